// Step through the rounds of a run, and see each pick in order.
(() => {
  const PARTS = [
    ["others", "to others", "--p0", "what it is worth to all other clients, as a first pick"],
    ["own", "to itself", "--p1", "what it is worth to itself"],
    ["annealed", "annealing", "--p2", "what annealing takes, for being chosen lately"],
    ["redundant", "overlap", "--p3", "what earlier picks took off (lower bar) or added (upper bar)"],
  ];
  const WORDS = { distance: "distance", cosine: "cosine", loss: "loss", gain: "gain" };
  const FLAGS = new Set(["by_valuation", "kept", "exploring", "overdue"]);
  const TITLES = { annealing: "annealing\u00a0×", change: "predicted change of its own loss",
    waited_alike: "tied on waiting time" };
  const title = (name) => TITLES[name] || name.replaceAll("_", " ");
  const GAIN = "Gain: how much everyone’s loss is expected to fall if this client trains, given the " +
    "earlier picks. The largest gain is picked.";
  const NEAR_TIE = 0.05; // of the gain

  Page.reasoned = (run) => Number(Object.keys(run.why.reasons).length > 0);

  Page.step = (round) => {
    const last = Page.rounds - 1;
    const at = Math.max(0, Math.min(last, round));
    Page.round = at === last ? null : at; // the last one stays the last while a run goes on
    const slider = byId("round");
    if (slider) slider.value = at;
    Page.draw("why", "heat", "map");
  };

  Page.keys = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    const end = { Home: 0, End: Page.rounds - 1 }[event.key];
    if (step === undefined && end === undefined) return;
    event.preventDefault();
    const id = document.activeElement.id || "heat-canvas";
    Page.step(end === undefined ? Page.at + step : end);
    const back = byId(id) || byId("heat").querySelector("canvas");
    if (back) back.focus();
  };

  Page.parts.stepper = () => {
    const now = Page.now, old = byId("round");
    if (old && old.dataset.run === `${Page.experiment}/${Page.run}`) {
      old.max = Math.max(0, Page.rounds - 1); // the same run, with more rounds
      old.value = Page.at;
      return;
    }
    const runs = now.runs.map((run, i) => [i, `${now.series[run.series].short}, seed ${run.seed}`]);
    const order = runs.sort(([a], [b]) =>
      now.runs[a].series - now.runs[b].series || now.runs[a].seed - now.runs[b].seed);
    const picker = select("Run", order, Page.run, (value) => {
      Page.run = Number(value);
      Page.draw("stepper", "why", "heat", "map", "losses", "health");
      byId("stepper").querySelector("select").focus();
    });
    const slider = el("input", { type: "range", id: "round", min: 0, step: 1,
      max: Math.max(0, Page.rounds - 1), "aria-label": "Round",
      "data-run": `${Page.experiment}/${Page.run}`,
      oninput: () => Page.step(Number(slider.value)) });
    slider.value = Page.at;
    const button = (text, label, step) => el("button", { type: "button", class: "button",
      "aria-label": label, onclick: () => Page.step(Page.at + step) }, text);
    put("stepper", picker, button("‹", "Round before", -1), slider, button("›", "Next round", 1),
      el("output", { id: "round-text", for: "round" }));
  };

  Page.parts.why = () => {
    const run = Page.running, t = Page.at;
    if (t < 0) {
      byId("why-run").textContent = "";
      byId("why-text").textContent = "No round of this run is finished yet.";
      put("why-table");
      put("why-notes");
      return;
    }
    const found = run.why.rounds[t], shown = roundName(t);
    byId("round-text").textContent = `${shown} of ${run.first_round + Page.rounds - 1}`;
    byId("round").setAttribute("aria-valuetext", shown);
    byId("why-run").textContent = whichRun(run);
    byId("why-text").textContent = sentence(run, t, found);
    put("why-table", found ? table(run, t, found) : el("p", { class: "hint" },
      "Chosen: ", run.attendance.selected[t].map(clientName).join(", ")));
    put("why-notes", found ? notes(run, found) : el("p", { class: "hint" },
      `To keep the page small, it explains every ${run.why.stride}th round. ` +
      "fedcor explain RUN --round T explains any."));
  };

  // What is shown before anyone chose a run, and why that one.
  function whichRun(run) {
    const now = Page.now;
    if (Page.run !== Page.defaultRun() || now.series.length < 2) return "";
    const name = `${now.series[run.series].short}, seed ${run.seed}`;
    if (!Page.reasoned(run)) return `Shown: ${name}. No record of these runs has reasons yet.`;
    if (run.series === 0) return `Shown: ${name}, a run of the best selector in the table.`;
    return `Shown: ${name}, the best selector whose record has reasons; ` +
      `that of ${now.series[0].short} has none.`;
  }

  function sentence(run, t, found) {
    const chosen = run.attendance.selected[t], failed = run.attendance.failed[t] || [];
    const series = Page.now.series[run.series];
    let text = `${series.short} chose ${plural(chosen.length, "client")}`;
    if (found && found.probed) text += ` after asking for ${plural(found.probed, "loss").replace("losss", "losses")}`;
    text += failed.length ? `; ${failed.length} did not deliver.` : "; all delivered.";
    const note = found && found.note !== undefined ? run.why.notes[found.note] : "";
    if (note) text += ` ${note[0].toUpperCase()}${note.slice(1)}.`;
    return found && found.reasons && found.reasons.gain ? `${text} ${GAIN}` : text;
  }

  function table(run, t, found) {
    const chosen = run.attendance.selected[t], failed = new Set(run.attendance.failed[t] || []);
    const reasons = found.reasons || {}, names = Object.keys(reasons).filter((n) => n !== "change");
    const left = new Set([1]); // columns of text
    const head = ["pick", "client"], cells = chosen.map((client, i) => [String(i + 1),
      el("span", {}, clientName(client), failed.has(client)
        ? el("span", { class: "pill" }, "did not deliver") : "")]);
    const add = (title, of, hint) => {
      const long = title.length > 20 && "long"; // in two or three lines, not in six
      head.push(hint || long ? el("span", { title: hint, class: long }, title) : title);
      chosen.forEach((client, i) => cells[i].push(of(i)));
    };
    if (found.parts) {
      left.add(2);
      const scale = Math.max(1e-12, ...chosen.map((_, i) => found.parts.reduce((sum, part) =>
        sum + Math.max(0, part[i]), 0)));
      add("how its gain is made up", (i) => bar(found.parts.map((part) => part[i]), scale));
    }
    for (const name of names) {
      const single = names.length === 1 || name === "gain";
      add(title(name), (i) => FLAGS.has(name)
        ? (reasons[name][i] === null ? "–" : reasons[name][i] ? "yes" : "no")
        : number(reasons[name][i]), run.why.reasons[name]);
      if (single && !found.parts) {
        const most = Math.max(1e-12, ...reasons[name].map((value) => Math.abs(value || 0)));
        add("", (i) => meter(reasons[name][i], most));
      }
    }
    if (reasons.change) {
      add(title("change"), (i) => number(reasons.change[i]));
      const over = (i) => found.spans[i] > 1
        ? el("span", { class: "sub" }, ` over ${found.spans[i]} rounds`) : "";
      if (found.actual) {
        add("actual change", (i) => found.actual[i] === null ? "not measured"
          : el("span", {}, number(found.actual[i]), over(i)));
      }
    }
    if (found.rivals) {
      add("runner\u2011up", (i) => found.rivals[i] === null ? "–" : clientName(found.rivals[i]));
      add(`ahead by (${WORDS[found.by_what] || "value"})`, (i) =>
        el("span", {}, number(found.by[i]), share(found.by[i], found.by_what, reasons, i)));
    }
    return el("table", {},
      el("thead", {}, el("tr", {}, head.map((text, i) =>
        el("th", { scope: "col", class: left.has(i) ? "left" : null }, text)))),
      el("tbody", {}, cells.map((row) => el("tr", {}, row.map((cell, i) =>
        el(i === 1 ? "th" : "td", { scope: i === 1 ? "row" : null,
          class: left.has(i) ? "left" : null }, cell))))));
  }

  // The lead in percent of the gain, so that a near-tie looks like one.
  function share(by, what, reasons, i) {
    if (reasons.overdue && reasons.overdue[i]) {
      return el("span", { class: "sub" }, " chosen because it had waited longest");
    }
    const gain = what === "gain" && reasons.gain ? reasons.gain[i] : null;
    if (by === null || gain === null || gain <= 0) return "";
    const text = ` ${number((100 * by) / gain, 2)}\u00a0%`;
    return el("span", { class: "sub" }, by < NEAR_TIE * gain ? `${text}, a near-tie` : text);
  }

  // Worth to others and to itself to the right; what was taken off, from that end back.
  function bar(values, scale) {
    const width = 220, height = 28, x = (value) => (value / scale) * (width - 4);
    const picture = svg("svg", { width, height, role: "img", "aria-label": PARTS.map(([, text], i) =>
      `${text} ${number(values[i])}`).join(", ") });
    let at = 0;
    PARTS.forEach(([, , hue], i) => {
      const value = values[i], end = at + value;
      const from = Math.max(0, Math.min(at, end)), to = Math.max(at, end, 0);
      if (to - from > 1e-9) {
        picture.append(svg("rect", { x: x(from), y: value < 0 ? 15 : 3, height: 10, rx: 1,
          width: Math.max(0.8, x(to) - x(from)), fill: `var(${hue})` }));
      }
      at = end;
    });
    picture.append(svg("line", { x1: Math.max(0, x(at)), x2: Math.max(0, x(at)), y1: 0, y2: height,
      stroke: "var(--ink)", "stroke-width": 1.5 }));
    return picture;
  }

  function meter(value, most) {
    const picture = svg("svg", { width: 120, height: 12, "aria-hidden": "true" });
    if (value !== null) picture.append(svg("rect", { x: 0, y: 2, height: 8, rx: 2,
      width: Math.max(1, (Math.abs(value) / most) * 118), fill: "var(--heat-1)" }));
    return picture;
  }

  function notes(run, found) {
    const list = [];
    if (found.parts) {
      list.push(el("div", { class: "key" }, PARTS.map(([, text, hue, meaning]) =>
        el("span", { title: meaning }, el("i", { colour: `var(${hue})` }), `${text}: ${meaning}`)),
      el("span", {}, "line: the gain, which they add up to")));
    }
    if (found.candidates) {
      list.push(el("p", { class: "hint" }, "Candidates and their losses: ",
        found.candidates.map(([c, loss]) => `${clientName(c)} (${number(loss)})`).join(", "), "."));
    }
    if (found.before_rules) {
      list.push(el("p", { class: "note" },
        `Before the rules changed it, the choice was ${found.before_rules.map(clientName).join(", ")}.`));
    }
    for (const [rule, count] of Object.entries(found.unmet || {})) {
      list.push(el("p", { class: "note" }, `Rule not met: ${rule}, ${plural(count, "client")} missing.`));
    }
    const meanings = Object.keys(found.reasons || {}).filter((name) => run.why.reasons[name]);
    if (meanings.length) {
      list.push(el("details", {}, el("summary", {}, "What the columns mean"), el("dl",
        { class: "facts" }, meanings.map((name) => el("div", {}, el("dt", {},
          title(name)), el("dd", {}, run.why.reasons[name]))))));
    }
    return list;
  }
})();
