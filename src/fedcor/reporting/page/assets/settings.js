// What was run: the command, seeds, versions, settings.
(() => {
  Page.parts.settings = () => {
    const own = Page.now.run_with, body = [];
    if (own.command) {
      const copied = el("button", { type: "button", class: "button", onclick: () =>
        copy(own.command).then(() => {
          copied.textContent = "Copied";
          setTimeout(() => { copied.textContent = "Copy"; }, 1500);
        }) }, "Copy");
      body.push(el("p", { class: "hint" }, "This command runs it again:"),
        el("div", { class: "command" }, el("code", { id: "command" }, own.command), copied));
    } else {
      body.push(missing("No single command of fedcor repeats this: it was run from Python, from a " +
        "TOML file, on Flower, or with parts of your own. Its settings are below."));
    }
    body.push(el("h3", {}, "Seeds and versions"),
      facts([["seeds", own.seeds], ...own.versions]));
    body.push(el("h3", {}, "Settings of every run"), facts(own.settings));
    for (const series of Page.now.series) {
      const options = own.options[series.name] || [];
      if (options.length) {
        body.push(el("details", {}, el("summary", {}, swatch(series), series.name),
          facts(options)));
      }
    }
    if (own.folders.length) {
      body.push(el("details", {}, el("summary", {}, `Records (${plural(own.folders.length, "run")})`),
        own.folders.map((folder) => el("div", {}, el("code", {}, folder)))));
    }
    put("settings-body", body);
  };

  const facts = (pairs) => el("dl", { class: "facts" }, pairs.map(([key, value]) =>
    el("div", {}, el("dt", {}, key), el("dd", {}, value))));

  function copy(text) {
    if (navigator.clipboard && window.isSecureContext) {
      return navigator.clipboard.writeText(text).catch(() => byHand(text));
    }
    byHand(text);
    return Promise.resolve();
  }

  // Pages from a disk may not use the clipboard directly.
  function byHand(text) {
    const box = el("textarea", { "aria-hidden": "true" });
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
})();
