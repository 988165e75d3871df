// How well FedCor's Gaussian process predicts loss changes.
(() => {
  Page.parts.health = () => {
    const host = "health-body";
    const learners = [...new Set(Page.now.runs.filter((run) => run.health)
      .map((run) => Page.now.series[run.series].short))];
    byId("health").hidden = byId("to-health").hidden = !learners.length;
    if (!learners.length) return;
    const shown = learner(), found = shown.health, name = (one) => Page.now.series[one.series].short;
    const other = shown === Page.running ? ""
      : `${name(Page.running)} learns no Gaussian process, so this is a run of ${name(shown)}. `;
    const run = `${name(shown)}, seed ${shown.seed}`;
    const text = found.forecasts
      ? `${other}In ${run}, before each of ${plural(found.forecasts, "refit")} the Gaussian process had to ` +
        "predict the loss changes of clients from those of the clients that trained."
      : `${other}In ${run}: ${found.note}.`;
    const cost = `${plural(found.refits, "fit")}; ${found.probed} losses asked for in ` +
      `${plural(found.probe_rounds, "round")}` + (found.probe_bytes === null ? "."
      : `, which took ${bytes(found.probe_bytes)} of the ${bytes(found.bytes)} in all.`);
    put(host, found.sentence && el("p", { class: "says" }, together(found.sentence)),
      el("p", { class: "hint" }, text, " ", cost));
    if (!found.forecasts) return;
    const two = el("div", { class: "two" }), left = el("div"), right = el("div");
    two.append(left, right);
    byId(host).append(two);
    const names = found.rounds.map((t) => t + shown.first_round);
    left.append(el("h3", {}, "Log score of the predictions, nats per client"),
      lines(left, names, [["Gaussian process, all clients jointly", found.log_score, "--h0", null],
        ["Gaussian process, client by client", found.each, "--h1", null],
        ["independent clients", found.independent, "--ink", "5 4"]]),
      el("p", { class: "hint" }, "Higher is better. Client by client, a score is above the dashed " +
        "line where changes are predicted better, and also where variances that are too large " +
        "become smaller. Triangles: below the chart."));
    if (found.calibration) {
      right.append(el("h3", {}, "Calibration"), calibration(right, found.calibration),
        el("p", { class: "hint" }, "How many changes were within the prediction intervals, by their " +
          "nominal coverage. On the diagonal the process is right; below, it is overconfident; " +
          `above, it is underconfident. ${found.calibration.clients} predictions.`));
    }
    if (found.agreement.some((value) => value !== null)) {
      right.append(el("h3", {}, "Agreement of predicted and actual changes"),
        lines(right, names, [["agreement", found.agreement, "--h0", null]], 1),
        el("p", { class: "hint" }, "Cosine of the predicted and the actual changes: 1 where they " +
          "are proportional, 0 where they have nothing in common."));
    }
    if (found.similarity.some((value) => value !== null)) {
      left.append(el("h3", {}, "Similarity of successive covariances"),
        lines(left, names, [["similarity", found.similarity, "--h0", null]], 1),
        el("p", { class: "hint" }, "Cosine of the covariance before and after a refit: near 1, " +
          "refitting changes little."));
    }
  };

  // The run that is looked into, or the best that learns a process, with the same seed if there is one.
  function learner() {
    if (Page.running.health) return Page.running;
    const same = (run) => Number(run.seed === Page.running.seed);
    return Page.now.runs.filter((run) => run.health)
      .sort((a, b) => same(b) - same(a) || a.series - b.series || a.seed - b.seed)[0];
  }

  // Round numbers at even steps.
  function ticks(low, high, most) {
    const step = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5].map((power) => n * 10 ** power))
      .sort((a, b) => a - b).find((size) => (high - low) / size < most) || high - low || 1;
    const first = Math.ceil(low / step) * step;
    return Array.from({ length: Math.floor((high - first) / step) + 1 }, (_, i) => first + i * step);
  }

  function frame(width, height, label) {
    return svg("svg", { width, height, role: "img", "aria-label": label });
  }

  function lines(host, xs, series, top = null) {
    const width = host.clientWidth || 400, height = 200, left = 46, bottom = 34, right = 8, pad = 8;
    const known = series.flatMap(([, values]) => values.filter((value) => value !== null));
    const high = top === null ? Math.max(...known) : top;
    // A few predictions of the first fits may be very bad; they do not set the scale.
    const sorted = [...known].sort((a, b) => a - b);
    const [q1, q3] = [0.25, 0.75].map((part) => sorted[Math.floor(part * (sorted.length - 1))]);
    const low = top !== null ? sorted[0] : Math.max(sorted[0], q1 - 4 * Math.max(q3 - q1, (high - q1) / 4, 1e-9));
    const x = (value) => left + ((value - xs[0]) / (xs.at(-1) - xs[0] || 1)) * (width - left - right);
    const y = (value) => pad + (1 - (value - low) / (high - low || 1)) * (height - bottom - pad);
    const picture = frame(width, height, series.map(([name, values]) => `${name}: last ` +
      number(values.filter((value) => value !== null).at(-1))).join("; "));
    // Where zero is in between, it has a line of its own, and no other label is close to it.
    const across = [low, (low + high) / 2, high].filter((value) => !(low < 0 && high > 0)
      || Math.abs(y(value) - y(0)) > 14);
    for (const value of across) {
      picture.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value),
        stroke: "var(--grid)" }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 2)));
    }
    if (low < 0 && high > 0) {
      picture.append(svg("line", { x1: left, x2: width - right, y1: y(0), y2: y(0), class: "zero",
        stroke: "var(--soft)" }),
      svg("text", { x: left - 6, y: y(0) + 4, "text-anchor": "end" }, "0"));
    }
    for (const value of ticks(xs[0], xs.at(-1), width / 60)) {
      picture.append(svg("line", { x1: x(value), x2: x(value), y1: height - bottom, stroke:
        "var(--line)", y2: height - bottom + 4 }), svg("text", { x: x(value), class: "tick",
        y: height - bottom + 17, "text-anchor": "middle" }, String(value)));
    }
    picture.append(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" },
      "round"));
    for (const [name, values, hue, dash] of series) {
      const points = values.map((value, i) => value === null ? null
        : [x(xs[i]), y(Math.max(value, low)), i]).filter(Boolean);
      picture.append(svg("polyline", { points: points.map((p) => `${p[0]},${p[1]}`).join(" "),
        fill: "none", stroke: `var(${hue})`, "stroke-width": 2, "stroke-dasharray": dash }));
      for (const [px, py, i] of points) {
        const text = svg("title", {}, `${name}, round ${xs[i]}: ${number(values[i])}`);
        picture.append(values[i] < low
          ? svg("path", { d: `M${px - 4} ${py - 4}h8l-4 7z`, fill: `var(${hue})` }, text)
          : svg("circle", { cx: px, cy: py, r: 2.5, fill: `var(${hue})` }, text));
      }
    }
    if (series.length === 1) return picture;
    return el("div", {}, picture, el("div", { class: "key" }, series.map(([name, , hue]) =>
      el("span", {}, el("i", { colour: `var(${hue})` }), name))));
  }

  function calibration(host, { levels, coverage }) {
    const width = Math.min(host.clientWidth || 320, 340), height = width * 0.9;
    const left = 62, bottom = 36, pad = 8;
    const x = (value) => left + value * (width - left - pad);
    const y = (value) => pad + (1 - value) * (height - bottom - pad);
    const picture = frame(width, height, "Calibration: " + levels.map((level, i) =>
      `${percent(level)} interval holds ${percent(coverage[i])}`).filter((_, i) => i % 3 === 1).join(", "));
    for (const value of [0, 0.5, 1]) {
      picture.append(svg("line", { x1: left, x2: width - pad, y1: y(value), y2: y(value),
        stroke: "var(--grid)" }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, percent(value)),
      svg("text", { x: x(value), y: height - bottom + 16,
        "text-anchor": ["start", "middle", "end"][value * 2] }, percent(value)));
    }
    picture.append(svg("line", { x1: x(0), y1: y(0), x2: x(1), y2: y(1), stroke: "var(--soft)",
      "stroke-dasharray": "4 4" }));
    const points = [[0, 0], ...levels.map((level, i) => [level, coverage[i]])];
    picture.append(svg("polyline", { points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "),
      fill: "none", stroke: "var(--h0)", "stroke-width": 2.5 }));
    picture.append(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" },
      "nominal coverage"));
    const side = svg("text", { "text-anchor": "middle",
      transform: `translate(12 ${(height - bottom) / 2}) rotate(-90)` }, "observed coverage");
    picture.append(side);
    return picture;
  }
})();
