// Accuracy and loss against rounds, bytes and time, drawn by uPlot.
(() => {
  const look = { y: 0, x: "rounds", log: false, smooth: true };
  let chart = null, hint = null, zoomed = false;

  Page.parts.curves = () => {
    const now = Page.now;
    if (look.y >= now.measures.length) look.y = 0;
    controls();
    legend();
    plot();
  };

  function controls() {
    const now = Page.now;
    const redraw = (key) => (value) => { look[key] = value; Page.draw("curves"); focusBack(key, value); };
    const named = { accuracy: "Accuracy", loss: "Loss" };
    const known = (key) => now.series.some((s) => s[key].some((value) => value !== null));
    const times = [["seconds", "time"], ["simulated", "simulated time"]]
      .filter(([key]) => known(key));
    const parts = [
      now.measures.length > 1 && segments("measure", "Show",
        now.measures.map((name, place) => [String(place), named[name] || name]), String(look.y),
        (value) => redraw("y")(Number(value))),
      segments("against", "against",
        [["rounds", "rounds"], ["bytes", "bytes"], ...times], look.x, redraw("x")),
      now.smooth > 1 && check(`${now.smooth}-round mean`, look.smooth, redraw("smooth")),
      check("log scale", look.log, redraw("log")),
    ];
    const reset = el("button", { type: "button", class: "button", id: "zoom-out", onclick: unzoom },
      "Show all");
    reset.hidden = true;
    put("curve-controls", ...parts, reset);
    const seeds = Math.max(...now.series.map((s) => s.seeds));
    byId("curve-hint").textContent =
      (seeds > 1 ? "Line: mean over seeds; band: lowest to highest seed. " : "") +
      "Drag to zoom, double-click to see all. With the chart in focus: left and right move " +
      "through the rounds, Escape shows all.";
  }

  function focusBack(key, value) {
    const name = { y: "measure", x: "against" }[key];
    const box = name
      ? byId("curve-controls").querySelector(`input[name=${name}][value="${value}"]`)
      : [...byId("curve-controls").querySelectorAll("input[type=checkbox]")]
        .at(key === "log" ? -1 : 0);
    if (box) box.focus();
  }

  function legend() {
    put("legend", Page.now.series.map((series) => el("button", {
      type: "button", "aria-pressed": String(!Page.hidden.has(series.name)), title: series.name,
      onclick(event) {
        const off = Page.hidden.has(series.name);
        if (off) Page.hidden.delete(series.name); else Page.hidden.add(series.name);
        event.currentTarget.setAttribute("aria-pressed", String(off));
        plot();
      },
    }, swatch(series), series.short)));
  }

  const high = (width) => Math.round(Math.max(260, Math.min(420, width * 0.45)));
  const shown = () => Page.now.series.filter((s) => !Page.hidden.has(s.name) && s.rounds.length);

  // One x for all: where series were measured elsewhere, there is null, which lines bridge.
  function columns(list) {
    const known = (values) => values.map((value) =>
      look.log && value !== null && value <= 0 ? null : value);
    const tables = list.map((series) => {
      const own = series.measures[look.y];
      const band = (look.smooth && own.smooth) || own.raw;
      const xs = look.x === "rounds"
        ? series.rounds.map((r) => r - 1 + series.first_round) : series[look.x];
      const keep = xs.map((x, i) => x !== null && (i === 0 || x > xs[i - 1]) ? i : -1)
        .filter((i) => i >= 0);
      const [mean, low, high] = band.map((values) => known(keep.map((i) => values[i])));
      return [keep.map((i) => xs[i]), mean, low || mean, high || mean];
    });
    return tables.length ? uPlot.join(tables) : [[], []];
  }

  function plot() {
    const host = byId("curve-chart"), now = Page.now, list = shown();
    if (chart) chart.destroy();
    host.replaceChildren();
    chart = null;
    if (!now.series.some((s) => s.rounds.length)) {
      host.append(missing("No round is finished yet."));
      return;
    }
    const name = now.measures[look.y], data = columns(list);
    const ink = css("--soft"), grid = css("--grid");
    const axis = (more) => ({ stroke: ink, grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif", ...more });
    const xNames = { rounds: "communication round", bytes: "bytes sent down and up",
      seconds: "time of the run", simulated: "simulated time" };
    const xText = { rounds: (v) => String(v), bytes, seconds, simulated: seconds }[look.x];
    const series = [{}], bands = [];
    for (const one of list) {
      const line = css(`--s${one.look}`);
      const dash = DASHES[LINES[one.look]];
      series.push({ label: one.short, stroke: line, width: 2, dash, spanGaps: true,
        points: { show: one.rounds.length < 3, size: 5, fill: line } });
      for (const end of ["lowest", "highest"]) {
        series.push({ label: `${one.short} ${end}`, width: 0, spanGaps: true,
          stroke: "transparent", points: { show: false } });
      }
      const at = series.length;
      if (one.seeds > 1) bands.push({ series: [at - 1, at - 2], fill: `${line}26` });
    }
    const width = host.clientWidth;
    chart = new uPlot({
      width, height: high(width),
      scales: { x: { time: false }, y: { distr: look.log ? 3 : 1 } },
      legend: { show: false },
      cursor: { points: { size: 7 }, drag: { x: true, y: false }, focus: { prox: -1 } },
      axes: [
        axis({ label: xNames[look.x], labelSize: 20, size: 32, values: (_, ticks) => ticks.map(xText),
          space: look.x === "rounds" ? 50 : 75 }),
        axis({ label: ["accuracy", "loss"].includes(name) ? `test ${name}` : name, labelSize: 22,
          size: 58, values: (_, ticks) => ticks.map((v) =>
            v === null ? "" : name === "accuracy" ? percent(v) : number(v)) }),
      ],
      series, bands,
      hooks: {
        draw: [(u) => target(u, name)],
        setCursor: [(u) => hover(u, list, name, xText)],
        setSelect: [() => { zoomed = true; byId("zoom-out").hidden = false; }],
      },
    }, data, host);
    hint = tip(host);
    const canvas = chart.root;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", describe(list, name));
    canvas.addEventListener("keydown", keys);
    canvas.addEventListener("blur", () => hint.hide());
    chart.over.addEventListener("dblclick", unzoomed);
    chart.over.addEventListener("mouseleave", () => hint.hide());
    zoomed = false;
  }

  function target(u, name) {
    const now = Page.now;
    if (now.target === null || name !== "accuracy") return;
    const y = u.valToPos(now.target, "y", true);
    if (!(y > u.bbox.top && y < u.bbox.top + u.bbox.height)) return;
    const pixel = devicePixelRatio, pen = u.ctx;
    pen.save();
    pen.strokeStyle = pen.fillStyle = css("--soft");
    pen.lineWidth = pixel;
    pen.setLineDash([4 * pixel, 4 * pixel]);
    pen.beginPath();
    pen.moveTo(u.bbox.left, y);
    pen.lineTo(u.bbox.left + u.bbox.width, y);
    pen.stroke();
    pen.font = `${12 * pixel}px system-ui, sans-serif`;
    pen.textAlign = "left";
    pen.fillText(`target ${now.target_text}`, u.bbox.left + 6 * pixel, y - 5 * pixel);
    pen.restore();
  }

  // Each series at the nearest of its own points.
  function hover(u, list, name, xText) {
    const at = u.cursor.idx;
    if (at === null || at === undefined || !hint || u.cursor.left < 0) { if (hint) hint.hide(); return; }
    const x = u.data[0][at];
    const rows = list.map((series, place) => {
      const [mean, low, high] = [1, 2, 3].map((k) => u.data[1 + 3 * place + k - 1]);
      let i = at, j = at;
      while (i >= 0 && mean[i] == null) i--;
      while (j < mean.length && mean[j] == null) j++;
      const near = i < 0 ? j : j >= mean.length ? i : at - i <= j - at ? i : j;
      return { series, value: mean[near], low: low[near], high: high[near] };
    }).filter((row) => row.value !== null && row.value !== undefined)
      .sort((a, b) => b.value - a.value);
    const title = look.x === "rounds" ? `round ${x}` : xText(x);
    const off = u.over.getBoundingClientRect(), host = byId("curve-chart").getBoundingClientRect();
    hint.show(u.cursor.left + off.left - host.left, u.cursor.top + off.top - host.top,
      el("b", {}, title), rows.map(({ series, value, low, high }) => tipRow(series, series.short,
        measure(name, value) + (series.seeds > 1 && low !== high
          ? ` (${measure(name, low)} to ${measure(name, high)})` : ""))));
  }

  function describe(list, name) {
    const ends = list.map((series) => {
      const band = series.measures[look.y].raw[0].filter((value) => value !== null);
      return `${series.name} ends at ${measure(name, band.at(-1))}`;
    });
    return `Curves of ${name} against ${look.x}: ${ends.join(", ")}. Left and right arrow keys ` +
      "read values.";
  }

  function keys(event) {
    const u = chart, step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") { unzoom(); return; }
    if (!step) return;
    event.preventDefault();
    const xs = u.data[0];
    const from = u.cursor.idx ?? (step > 0 ? -1 : xs.length);
    const at = Math.max(0, Math.min(xs.length - 1, from + step * (event.shiftKey ? 10 : 1)));
    u.setCursor({ left: u.valToPos(xs[at], "x"), top: u.over.clientHeight / 3 });
  }

  function unzoomed() { zoomed = false; byId("zoom-out").hidden = true; }

  function unzoom() {
    if (chart) chart.setData(chart.data);
    unzoomed();
  }

  Page.resizeCurves = () => {
    const width = byId("curve-chart").clientWidth;
    if (chart && width && chart.width !== width) chart.setSize({ width, height: high(width) });
  };
  Page.isZoomed = () => zoomed;
})();
