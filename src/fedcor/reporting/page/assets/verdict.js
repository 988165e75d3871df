// The sentence and the table of the terminal; columns sort.
(() => {
  let sorted = null; // {key, down}; null for the order of the ranking

  Page.parts.verdict = () => {
    const now = Page.now;
    byId("verdict-title").textContent = now.title;
    byId("verdict-text").textContent = together(now.verdict);
    const texts = [...now.notes, ...Page.data.notes];
    put("notes", texts.map((text) => el("p", { class: "note" }, text)));
    put("table-hint", hints(now).map((text) => el("p", { class: "hint" }, together(text))));
    table();
  };

  function hints(now) {
    const has = (key) => now.table.columns.some((column) => column.key === key), list = [];
    if (has("rounds")) {
      const curves = now.smooth > 1 ? ` The curves show ${now.smooth}-round means, which may reach ` +
        "it later or not at all." : "";
      list.push(`First round at ${now.target_text}: how many rounds were done when the accuracy of ` +
        `a single round first reached the target, mean over seeds.${curves}`);
    }
    if (has("gap")) {
      list.push("Difference from the baseline: paired seed by seed, with its 95 % interval. Where the " +
        "interval contains zero, the difference may be noise.");
    }
    return list;
  }

  // In a narrow window, what the verdict rests on comes first.
  const narrow = matchMedia("(max-width: 760px)");
  narrow.addEventListener("change", () => Page.draw("verdict"));
  function ordered() {
    const columns = Page.now.table.columns, first = (column) => column.key === "gap";
    return narrow.matches
      ? [...columns.filter(first), ...columns.filter((column) => !first(column))] : columns;
  }

  function table() {
    const now = Page.now, columns = ordered(), { rows } = now.table;
    const places = rows.map((_, place) => place);
    if (sorted) {
      const value = (place) => sorted.key === "name"
        ? now.series[place].name : rows[place][sorted.key][0];
      places.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null); // unknown ones last
        const order = typeof x === "string" ? x.localeCompare(y) : x - y;
        return sorted.down ? -order : order;
      });
    }
    const head = [{ key: "name", title: "selector" }, ...columns].map((column) => {
      const on = sorted && sorted.key === column.key;
      const direction = on ? (sorted.down ? "descending" : "ascending") : "none";
      return el("th", { scope: "col", "aria-sort": direction, class: column.key === "gap" && "left" },
        el("button", { type: "button", onclick: () => sort(column.key) }, together(column.title)));
    });
    const scale = gapScale(rows);
    const body = places.map((place) => {
      const series = now.series[place];
      const name = el("th", { scope: "row", title: series.name }, swatch(series),
        series.short.split(/(?<=_)/).flatMap((part) => [part, el("wbr")])); // may wrap after a _
      return el("tr", {}, name, columns.map(({ key }) => key === "gap"
        ? el("td", { class: "left" }, gap(rows[place].gap, scale, series))
        : el("td", {}, rows[place][key][1].replace(/^-$/, "–"))));
    });
    put("table", el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
  }

  function sort(key) {
    const first = key !== "name" && ["mean", "final", "gap"].includes(key); // large ones first
    if (sorted && sorted.key === key) {
      sorted = sorted.down === first ? { key, down: !first } : null;
    } else sorted = { key, down: first };
    table();
    const at = ["name", ...ordered().map((c) => c.key)].indexOf(key);
    byId("table").querySelectorAll("th button")[at].focus();
  }

  function gapScale(rows) {
    const ends = rows.flatMap((row) => row.gap ? [row.gap[0], row.gap[2], row.gap[3]] : [])
      .filter((value) => value !== null);
    return Math.max(1e-12, ...ends.map(Math.abs)) * 1.05;
  }

  // The interval as a small picture around zero, then the numbers, then what they mean.
  function gap([mean, text, low, high, words, kind], scale, series) {
    const x = (value) => 45 + (value / scale) * 40;
    const picture = svg("svg", { width: 90, height: 26, "aria-hidden": "true" },
      svg("line", { x1: 45, x2: 45, y1: 2, y2: 24, stroke: "var(--soft)", "stroke-width": 1 }));
    picture.style.setProperty("--c", colour(series));
    if (low !== null && high !== null && kind !== "baseline") {
      picture.append(svg("line", { x1: x(low), x2: x(high), y1: 13, y2: 13, stroke: "var(--c)",
        "stroke-width": 3, "stroke-linecap": "round" }));
    }
    if (mean !== null && kind !== "baseline") {
      picture.append(svg("circle", { cx: x(mean), cy: 13, r: 4.5, fill: "var(--c)" }));
    }
    const shown = kind === "baseline" ? "" : text.replaceAll("-", "−");
    return el("span", { class: "gap" }, picture, el("span", { class: "words" },
      el("span", { class: `tag ${kind}` }, words), el("span", { class: "num sub" }, shown)));
  }
})();
