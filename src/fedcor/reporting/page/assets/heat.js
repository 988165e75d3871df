// Client by round: chosen and delivered, chosen and failed, left alone. Drawn on a canvas.
(() => {
  const LEFT = 46, TOP = 4, BOTTOM = 34;
  let hint = null, canvas = null, geometry = null;

  // Why a chosen client did not take part, as records name it.
  const WHY = { dropped: "it failed or was not reached", late: "it was late",
    refused: "its update was refused", other: "no usable update came" };

  Page.parts.heat = () => {
    const host = byId("heat"), run = Page.running, attendance = run.attendance;
    if (!Page.rounds || !attendance.clients) {
      host.replaceChildren(missing("The record does not say who was chosen."));
      canvas = null;
      return;
    }
    const width = host.clientWidth;
    const height = Math.round(Math.max(140, Math.min(420, attendance.clients * 4)));
    const pixel = devicePixelRatio || 1;
    canvas = el("canvas", { role: "img", tabindex: 0,
      "aria-label": `Client by round: ${plural(attendance.clients, "client")}, ` +
        `${plural(Page.rounds, "round")}. ${failures(attendance)} Arrow keys step through the rounds.` });
    canvas.width = width * pixel;
    canvas.height = (height + TOP + BOTTOM) * pixel;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height + TOP + BOTTOM}px`;
    geometry = { width: width - LEFT - 6, height, rounds: Page.rounds, clients: attendance.clients };
    const kinds = [["took part", "--heat-1"]];
    if (Object.keys(attendance.failed).length) kinds.push(["chosen, did not deliver", "--heat-fail"]);
    if (Object.keys(attendance.alone).length) kinds.push(["left alone after faults", "--heat-alone"]);
    host.replaceChildren(canvas, el("div", { class: "key" }, kinds.map(([text, name]) =>
      el("span", {}, el("i", { colour: `var(${name})` }), text))));
    hint = tip(host);
    canvas.addEventListener("mousemove", hover);
    canvas.addEventListener("mouseleave", () => hint.hide());
    canvas.addEventListener("click", (event) => Page.step(place(event).round));
    canvas.addEventListener("keydown", Page.keys);
    paint(pixel);
  };

  function failures(attendance) {
    const count = Object.values(attendance.failed).reduce((sum, clients) => sum + clients.length, 0);
    return count ? `${plural(count, "time")} a chosen client did not deliver.` :
      "Every chosen client delivered.";
  }

  function paint(pixel) {
    const { width, height, rounds, clients } = geometry, attendance = Page.running.attendance;
    const pen = canvas.getContext("2d");
    pen.scale(pixel, pixel);
    pen.fillStyle = css("--panel");
    pen.fillRect(LEFT, TOP, width, height);
    const wide = width / rounds, high = height / clients;
    // Cells that are narrower than a pixel are drawn as a pixel, and lighter where few share it.
    const cell = (t, client, fill) => {
      pen.fillStyle = fill;
      pen.fillRect(LEFT + t * wide, TOP + client * high, Math.max(wide - (wide > 3 ? 0.6 : 0), 0.9),
        Math.max(high - (high > 3 ? 0.6 : 0), 0.9));
    };
    const [took, failed, alone] = ["--heat-1", "--heat-fail", "--heat-alone"].map(css);
    pen.globalAlpha = wide < 1 ? Math.max(0.35, wide) : 1;
    attendance.selected.forEach((chosen, t) => chosen.forEach((client) => cell(t, client, took)));
    pen.globalAlpha = 1;
    for (const [t, list] of Object.entries(attendance.alone)) list.forEach((c) => cell(+t, c, alone));
    for (const [t, list] of Object.entries(attendance.failed)) list.forEach((c) => cell(+t, c, failed));
    pen.strokeStyle = css("--ink");
    pen.lineWidth = 1.2;
    const x = LEFT + Page.at * wide;
    pen.strokeRect(x - 0.5, TOP - 2, Math.max(wide, 1.5) + 0.5, height + 4);
    axes(pen, width, height, rounds, clients);
  }

  function axes(pen, width, height, rounds, clients) {
    pen.fillStyle = css("--soft");
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    const first = Page.running.first_round;
    for (const t of ticks(rounds, Math.max(2, Math.floor(width / 90)))) {
      pen.fillText(String(t + first), LEFT + ((t + 0.5) * width) / rounds, TOP + height + 15);
    }
    pen.fillText("round", LEFT + width / 2, TOP + height + 30);
    pen.textAlign = "right";
    for (const c of ticks(clients, 5)) {
      pen.fillText(String(c), LEFT - 8, TOP + ((c + 0.5) * height) / clients + 4);
    }
    pen.save();
    pen.translate(12, TOP + height / 2);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.fillText("client", 0, 0);
    pen.restore();
  }

  function ticks(count, most) {
    const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000]
      .find((size) => count / size <= most) || Math.ceil(count / most);
    return Array.from({ length: Math.ceil(count / step) }, (_, i) => i * step);
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    const { width, height, rounds, clients } = geometry;
    const clamp = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value)));
    return {
      x: event.clientX - box.left, y: event.clientY - box.top,
      round: clamp(((event.clientX - box.left - LEFT) / width) * rounds, rounds),
      client: clamp(((event.clientY - box.top - TOP) / height) * clients, clients),
    };
  }

  function hover(event) {
    const at = place(event), attendance = Page.running.attendance, t = at.round;
    const chosen = attendance.selected[t], failed = attendance.failed[t] || [], alone = attendance.alone[t] || [];
    const c = at.client;
    const why = Object.entries(attendance.reasons[t] || {}).find(([, clients]) => clients.includes(c));
    const what = failed.includes(c) ? `chosen, but ${why ? WHY[why[0]] || why[0] : WHY.other}`
      : chosen.includes(c) ? "chosen, took part"
        : alone.includes(c) ? "left alone after faults" : "not chosen";
    const faults = Object.entries(attendance.faults[t] || {}).map(([kind, n]) => `${n} ${kind}`);
    const more = [`${roundName(t)}: ${plural(chosen.length, "client")} chosen`];
    if (failed.length) more.push(`${failed.length} did not deliver`);
    if (faults.length) more.push(`faults: ${faults.join(", ")}`);
    if (attendance.refused[t]) more.push(`${attendance.refused[t]} unusable answers`);
    hint.show(at.x, at.y, el("b", {}, `client ${clientName(c)}: ${what}`),
      more.map((text) => el("div", {}, text)));
  }
})();
