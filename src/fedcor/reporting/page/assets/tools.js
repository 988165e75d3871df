"use strict";
// What the parts of the page share. Text of records is set as text, never as markup.
const Page = {
  data: JSON.parse(document.getElementById("data").textContent),
  parts: {}, // name -> function that draws a part again
  hidden: new Set(), // names of series that are switched off
  experiment: 0, // which one is shown
  run: 0, // which of its runs is looked into
  round: null, // which round of it, from 0; null for the last
  get now() { return this.data.experiments[this.experiment]; },
  get running() { return this.now.runs[this.run]; },
  get rounds() { return this.running.attendance.selected.length; },
  get at() {
    return this.round === null ? this.rounds - 1 : Math.min(this.round, this.rounds - 1);
  },
  draw(...names) {
    if (!document.body.clientWidth) return; // in a window that is not shown; a resize draws it
    for (const name of names.length ? names : Object.keys(this.parts)) this.parts[name]();
  },
};

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return fill(node, attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "colour") node.style.setProperty("--c", value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);
const put = (id, ...children) => byId(id).replaceChildren(...children.flat(Infinity).filter(Boolean));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (series) => `var(--s${series.look})`;
const LINES = { 0: "dot", 2: "dash", 3: "dash", 6: "dash", 8: "dot" };
const DASHES = { dot: [2, 3], dash: [7, 4] };
const swatch = (series) =>
  el("span", { class: `swatch ${LINES[series.look] || ""}`, colour: colour(series) });
const missing = (...text) => el("p", { class: "missing" }, ...text);

// --- numbers -------------------------------------------------------------------------------------

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("-", "−");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return String(Number(value.toFixed(Math.min(places, 8)))).replace("-", "−");
}

function bytes(value) {
  const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  for (const [size, unit] of units) if (value >= size) return `${number(value / size)} ${unit}`;
  return `${number(value)} B`;
}

function seconds(value) {
  if (value >= 7200) return `${number(value / 3600)} h`;
  if (value >= 120) return `${number(value / 60)} min`;
  return `${number(value)} s`;
}

const percent = (value) => `${number(100 * value)} %`;
const together = (text) => text.replaceAll(" %", "\u00a0%"); // a number and its unit
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function measure(name, value) {
  if (value === null || value === undefined) return "–";
  return name === "accuracy" ? `${(100 * value).toFixed(1)} %` : number(value, 4);
}

function clientName(client) {
  const name = Page.running.clients.names[client];
  return name ? `${client} · ${name}` : `${client}`;
}

// The number of a round as people read it: Flower counts from 1.
const roundName = (t) => `round ${t + Page.running.first_round}`;

// --- controls ------------------------------------------------------------------------------------

function segments(name, title, options, chosen, change) {
  const labels = options.map(([value, text]) => {
    const input = el("input", { type: "radio", name, value, onchange: () => change(value) });
    input.checked = value === chosen;
    return el("label", {}, input, text);
  });
  return el("fieldset", {}, el("legend", {}, title), el("div", { class: "segments" }, labels));
}

function check(text, checked, change) {
  const input = el("input", { type: "checkbox", onchange: () => change(input.checked) });
  input.checked = checked;
  return el("label", { class: "check" }, input, text);
}

function select(title, options, chosen, change) {
  const box = el("select", { onchange: () => change(box.value) },
    options.map(([value, text]) => el("option", { value }, text)));
  box.value = String(chosen);
  return el("label", { class: "field" }, el("span", {}, title), box);
}

// --- what hangs beside the pointer ---------------------------------------------------------------

function tip(host) {
  const box = el("div", { class: "tip", role: "tooltip" });
  box.hidden = true;
  host.append(box);
  return {
    box,
    show(x, y, ...content) {
      box.replaceChildren(...content.flat(Infinity));
      box.hidden = false;
      const wide = host.clientWidth, own = box.offsetWidth;
      const left = x + 16 + own > wide ? Math.max(0, x - own - 16) : x + 16;
      box.style.left = `${left}px`;
      box.style.top = `${Math.max(0, y - box.offsetHeight / 2)}px`;
    },
    hide() { box.hidden = true; },
  };
}

function tipRow(series, name, value) {
  return el("div", { class: "row" },
    el("span", {}, series ? swatch(series) : "", name), el("span", {}, value));
}

function later(action) {
  let waiting = 0;
  return () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(action);
  };
}
