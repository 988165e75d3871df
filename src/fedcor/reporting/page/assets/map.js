// The map of clients, and how losses are spread over them.
(() => {
  // One for each label, all different; labels beyond them share one more.
  const HUES = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#e07b00",
    "#7a5bd0", "#8f5a2e", "#f2a3c7"];
  const OTHER = "#8a8f98", MOST_SLICES = 3;
  // From Viridis, without its ends.
  const SCALE = ["#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30"];
  let by = null;

  Page.parts.map = () => {
    const run = Page.running, found = run.map, host = byId("map");
    const ways = colourings(run);
    if (!ways.some(([key]) => key === by)) by = ways[0][0];
    byId("map-title").textContent = found
      ? `A map of the clients: ${found.what}` : "A map of the clients";
    if (!found) {
      put("map-controls");
      const learners = [...new Set(Page.now.runs.filter((r) => r.map).map((r) => Page.now.series[r.series].short))];
      host.replaceChildren(missing(learners.length
        ? `This selector learns no map of the clients. Choose a run of ${learners.join(" or ")} ` +
          "above to see one."
        : "No selector of these runs learns a map of the clients, or its runs have no checkpoint."));
      return;
    }
    put("map-controls", select("Colour by", ways, by, (value) => {
      by = value;
      Page.draw("map");
      byId("map-controls").querySelector("select").focus();
    }));
    draw(host, run, found);
  };

  function colourings(run) {
    const c = run.clients, ways = [];
    if (c.labels) ways.push(["label", "most frequent labels"]);
    ways.push(["chosen", "times chosen"]);
    if (c.sizes && new Set(c.sizes).size > 1) ways.push(["size", "samples"]);
    if (c.losses && c.losses.some((loss) => loss !== null)) ways.push(["loss", "last known loss"]);
    return ways;
  }

  // The labels of which a client has most: several where they are equally frequent.
  const top = (counts) => {
    const most = Math.max(...counts);
    return counts.map((_, label) => label).filter((label) => most > 0 && counts[label] === most);
  };
  const hue = (label) => HUES[label] || OTHER;

  function painter(run) {
    const c = run.clients;
    if (by === "label") {
      const slices = (client) => {
        const labels = top(c.labels[client]);
        return labels.length && labels.length <= MOST_SLICES ? labels.map(hue) : [OTHER];
      };
      const all = c.labels[0].map((_, label) => label);
      const tops = c.labels.map(top), key = all.slice(0, HUES.length)
        .map((label) => [`label ${label}`, hue(label)]);
      const vague = tops.some((labels) => !labels.length || labels.length > MOST_SLICES);
      const others = [all.length > HUES.length && `label ${HUES.length} and above`,
        vague && "many, equally"].filter(Boolean).join("; ");
      if (others) key.push([others, OTHER]);
      const split = tops.some((labels) => labels.length > 1 && labels.length <= MOST_SLICES);
      return { of: slices, key, note: split
        ? "A dot of several colours: its most frequent labels are equally frequent." : "" };
    }
    const values = { chosen: c.chosen, size: c.sizes, loss: c.losses }[by];
    const known = values.filter((value) => value !== null);
    const low = Math.min(...known), high = Math.max(...known);
    const step = (value) => SCALE[Math.min(SCALE.length - 1,
      Math.floor(((value - low) / (high - low || 1)) * SCALE.length))];
    return { note: "",
      of: (client) => [values[client] === null ? "transparent" : step(values[client])],
      key: [[number(low), SCALE[0]], [number((low + high) / 2), step((low + high) / 2)],
        [number(high), SCALE.at(-1)]] };
  }

  function draw(host, run, found) {
    const width = host.clientWidth, height = Math.round(Math.min(width * 0.72, 420)), pad = 18;
    const [x, y] = ["x", "y"].map((axis) => {
      const low = Math.min(...found[axis]), high = Math.max(...found[axis]);
      const size = axis === "x" ? width : height;
      return (value) => {
        const part = (value - low) / (high - low || 1);
        return pad + (axis === "x" ? part : 1 - part) * (size - 2 * pad);
      };
    });
    const paint = painter(run), chosen = new Set(run.attendance.selected[Page.at] || []);
    const picture = svg("svg", { width, height, role: "img", "aria-label":
      `Map of ${found.clients.length} clients by ${found.what}; the ${chosen.size} chosen in ` +
      `${roundName(Page.at)} are ringed.` });
    picture.append(svg("rect", { x: 0.5, y: 0.5, width: width - 1, height: height - 1, rx: 6,
      fill: "none", stroke: "var(--line)" }));
    const order = found.clients.map((client, i) => [client, i])
      .sort(([a], [b]) => chosen.has(a) - chosen.has(b));
    for (const [client, i] of order) {
      const on = chosen.has(client), r = on ? 7 : 5.5, hues = paint.of(client);
      const [cx, cy] = [x(found.x[i]), y(found.y[i])];
      if (hues.length > 1) picture.append(...slices(cx, cy, r, hues));
      picture.append(svg("circle", { cx, cy, r, fill: hues.length > 1 ? "transparent" : hues[0],
        stroke: on ? "var(--ink)" : "var(--soft)", "stroke-width": on ? 2.5 : 0.5,
        "data-client": client, class: on ? "chosen" : null }));
    }
    for (const [client, i] of order.filter(([client]) => chosen.has(client))) {
      const right = x(found.x[i]) < width - 45;
      picture.append(svg("text", { class: "number", x: x(found.x[i]) + (right ? 11 : -11),
        y: y(found.y[i]) + 4, "text-anchor": right ? "start" : "end" }, String(client)));
    }
    const shares = found.explained.map((part) => `${Math.round(100 * part)} %`);
    host.replaceChildren(picture,
      el("div", { class: "key" }, el("span", {}, "Ringed, with numbers: chosen in ",
        roundName(Page.at)),
        paint.key.map(([text, hue]) => el("span", {}, el("i", { colour: hue }), text))),
      el("p", { class: "hint" }, `Two principal components (${shares.join(" and ")} of the ` +
        `variance), as learnt after ${plural(found.round, "round")}. Nearby points look similar ` +
        `to the selector. ${paint.note}`));
    const hint = tip(host);
    picture.addEventListener("mousemove", (event) => {
      const client = event.target.getAttribute && event.target.getAttribute("data-client");
      if (client === null) { hint.hide(); return; }
      const box = host.getBoundingClientRect();
      hint.show(event.clientX - box.left, event.clientY - box.top, facts(run, Number(client)));
    });
    picture.addEventListener("mouseleave", () => hint.hide());
  }

  // A disc in equal sectors, from the top to the right.
  function slices(cx, cy, r, hues) {
    const at = (part) => `${cx + r * Math.sin(2 * Math.PI * part)} ${cy - r * Math.cos(2 * Math.PI * part)}`;
    return hues.map((fill, i) => svg("path", { fill, d: `M${cx} ${cy}L${at(i / hues.length)}` +
      `A${r} ${r} 0 0 1 ${at((i + 1) / hues.length)}Z` }));
  }

  function facts(run, client) {
    const c = run.clients, rows = [["times chosen", c.chosen[client]]];
    if (c.failed) rows.push(["did not deliver", c.failed[client]]);
    if (c.sizes) rows.push(["samples", c.sizes[client]]);
    if (c.losses) rows.push(["last known loss", number(c.losses[client])]);
    if (c.labels) {
      const all = c.labels[client].reduce((a, b) => a + b, 0);
      const mix = c.labels[client].map((n, label) => [n, label]).filter(([n]) => n)
        .sort(([a], [b]) => b - a).slice(0, 4);
      rows.push(["labels", mix.map(([n, label]) =>
        `${label} (${Math.round((100 * n) / all)} %)`).join(", ")]);
    }
    return [el("b", {}, `client ${clientName(client)}`),
      rows.map(([name, value]) => tipRow(null, name, String(value)))];
  }

  Page.parts.losses = () => {
    const host = byId("losses"), found = Page.running.losses;
    if (!found) {
      host.replaceChildren(missing("The record has no losses of single clients: this selector " +
        "does not ask for them."));
      return;
    }
    const width = host.clientWidth, height = 240, left = 34, bottom = 40, topPad = 8;
    const most = Math.max(...found.counts), low = found.edges[0], high = found.edges.at(-1);
    const x = (value) => left + ((value - low) / (high - low || 1)) * (width - left - 8);
    const y = (count) => topPad + (1 - count / most) * (height - bottom - topPad);
    const picture = svg("svg", { width, height, role: "img", "aria-label":
      `Losses of ${found.known} clients: median ${number(found.median)}, mean of the worst tenth ` +
      `${number(found.worst)}.` });
    for (const count of [0, Math.round(most / 2), most]) {
      picture.append(svg("line", { x1: left, x2: width - 8, y1: y(count), y2: y(count),
        stroke: "var(--grid)" }),
      svg("text", { x: left - 6, y: y(count) + 4, "text-anchor": "end" }, String(count)));
    }
    found.counts.forEach((count, i) => picture.append(svg("rect", { x: x(found.edges[i]) + 0.5,
      y: y(count), width: Math.max(1, x(found.edges[i + 1]) - x(found.edges[i]) - 1),
      height: y(0) - y(count), fill: "var(--heat-1)" })));
    for (const [value, dash] of [[found.median, null], [found.worst, "4 3"]]) {
      picture.append(svg("line", { x1: x(value), x2: x(value), y1: topPad, y2: y(0),
        stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": dash }));
    }
    for (const [value, anchor] of [[low, "start"], [(low + high) / 2, "middle"], [high, "end"]]) {
      picture.append(svg("text", { x: x(value), y: height - bottom + 16, "text-anchor": anchor },
        number(value)));
    }
    picture.append(svg("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" },
      "loss; height: number of clients"));
    host.replaceChildren(picture, el("p", { class: "hint" },
      `Of ${plural(found.known, "client")}: ${found.what}. Median ${number(found.median)} (line), ` +
      `mean of the worst tenth ${number(found.worst)} (dashed). Accuracies of single clients are ` +
      "not in the record."));
  };
})();
