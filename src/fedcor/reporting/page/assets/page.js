// Puts the parts together, and follows runs that go on.
(() => {
  function picker() {
    const host = byId("experiment-picker"), all = Page.data.experiments;
    host.hidden = all.length < 2;
    if (all.length < 2) return;
    host.replaceChildren(select("Experiment", all.map((one, i) => [i, one.name]), Page.experiment,
      (value) => {
        Page.experiment = Number(value);
        Page.run = Page.defaultRun();
        Page.round = null;
        Page.draw();
        host.querySelector("select").focus();
      }));
  }

  // The best selector's first seed, of those whose records have reasons, if there are any.
  Page.defaultRun = () => {
    const runs = Page.now.runs;
    return runs.map((_, i) => i).sort((a, b) => Page.reasoned(runs[b]) - Page.reasoned(runs[a])
      || runs[a].series - runs[b].series || runs[a].seed - runs[b].seed)[0];
  };

  Page.parts = { picker, ...Page.parts };

  // --- runs that go on ---------------------------------------------------------------------------

  const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

  async function follow() {
    const status = byId("status");
    let version = Page.data.version;
    status.className = "on";
    status.textContent = progress();
    for (;;) {
      try {
        const answer = await fetch(`data.json?after=${encodeURIComponent(version)}`,
          { cache: "no-store" });
        if (!answer.ok) { // what is shown stays; the server says what is wrong
          status.className = "";
          status.textContent = (await answer.text()).trim().slice(0, 300);
          await pause(2000);
          continue;
        }
        const fresh = await answer.json();
        status.className = "on";
        if (fresh.version !== version) {
          version = fresh.version;
          if (fresh.experiments) take(fresh);
        }
        status.textContent = progress();
        await pause(600); // a run may have many rounds in a second
      } catch {
        status.className = "";
        status.textContent = "the server has ended";
        await pause(2000);
      }
    }
  }

  // New rounds: what was being looked at stays, and a last round that was shown stays the last.
  function take(fresh) {
    const [name, run] = [Page.now.name, Page.running];
    Page.data = fresh;
    Page.experiment = Math.max(0, fresh.experiments.findIndex((one) => one.name === name));
    const same = Page.now.runs.findIndex((one) => one.seed === run.seed && one.path === run.path);
    Page.run = same >= 0 ? same : Page.defaultRun();
    const parts = Object.keys(Page.parts).filter((part) => !(part === "curves" && Page.isZoomed()));
    const focused = document.activeElement && document.activeElement.id;
    Page.draw(...parts);
    if (focused && byId(focused)) byId(focused).focus();
  }

  function progress() {
    const runs = Page.data.experiments.flatMap((one) => one.runs);
    const done = runs.reduce((sum, run) => sum + run.attendance.selected.length, 0);
    const all = runs.reduce((sum, run) => sum + Math.max(run.planned, run.attendance.selected.length), 0);
    return done < all ? `following: ${done} of ${all} rounds` : "all rounds are done";
  }

  // --- begin -------------------------------------------------------------------------------------

  byId("version").textContent = Page.data.fedcor;
  Page.run = Page.defaultRun();
  Page.draw();
  document.documentElement.dataset.ready = "yes";
  const again = later(() => { Page.resizeCurves(); Page.draw("heat", "map", "losses", "health"); });
  window.addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Page.draw());
  matchMedia("print").addEventListener("change", () => Page.draw("curves", "heat"));
  window.addEventListener("beforeprint", () => {
    for (const box of document.querySelectorAll("details")) box.open = true;
  });
  if (document.documentElement.dataset.live === "yes") follow();
})();
