// The Gantt chart: a row a device, compute above, send and receive below it; drag to zoom, double click for all.
(() => {
  const source = document.getElementById("timeline");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const box = document.querySelector(".gantt");
  const canvas = box.querySelector("canvas");
  const tip = box.querySelector(".tip");
  const draw = canvas.getContext("2d");
  const ROW = 46, HEAD = 24;
  const NAMED = {forward: "blue", infer: "blue", backward: "orange", update: "green", evaluate: "violet", test: "violet"};
  const OTHERS = ["teal", "grey", "green"];
  const rows = data.devices.map(() => []);
  for (const bar of data.bars) rows[bar[0]].push(bar);
  const longest = rows.map(row => row.reduce((most, bar) => Math.max(most, bar[1] < 3 ? bar[3] : 0), 0));
  const spans = [...new Set(data.bars.filter(bar => bar[1] === 0).map(bar => bar[4]))];
  const colour = new Map();
  let other = 0;
  for (const span of spans) {
    const known = Object.keys(NAMED).find(name => data.words[span].startsWith(name));
    colour.set(span, known ? NAMED[known] : OTHERS[other++ % OTHERS.length]);
  }
  let from = data.views[0]?.start ?? 0, to = data.views[0]?.end ?? data.end;
  let width = 0, gutter = 0, drag = null, paint = {};

  const height = () => HEAD + ROW * rows.length;
  const x = seconds => gutter + (seconds - from) / (to - from) * (width - gutter);
  const seconds = place => from + (place - gutter) / (width - gutter) * (to - from);
  const duration = value => value >= 1 ? `${value.toFixed(3)} s` : value >= 1e-3 ? `${(value * 1e3).toFixed(2)} ms` : `${(value * 1e6).toFixed(0)} µs`;
  const bytes = value => value >= 1e6 ? `${(value / 1e6).toFixed(2)} MB` : value >= 1e3 ? `${(value / 1e3).toFixed(1)} kB` : `${value} B`;

  function show(start, end) {
    const least = Math.max(data.end * 1e-6, 1e-5);
    if (end - start < least) { const middle = (start + end) / 2; start = middle - least / 2; end = middle + least / 2; }
    const length = Math.min(end - start, data.end);
    from = Math.max(0, Math.min(start, data.end - length));
    to = from + length;
    for (const button of buttons) button.setAttribute("aria-pressed", Math.abs(button.view.start - from) + Math.abs(button.view.end - to) < 1e-6 * data.end);
    tip.hidden = true;
    render();
  }

  function ticks() {
    const raw = (to - from) / Math.max(2, (width - gutter) / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= raw);
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const list = [];
    for (let index = Math.ceil(from / step); index * step <= to; index++) list.push([index * step, (index * step).toFixed(places)]);
    return list;
  }

  function rectangle(style, left, top, right, bottom) {
    // Narrower than a pixel, a bar is paler instead of wider: many of them are as dark as the share of time that they take.
    const start = Math.max(left, gutter), end = Math.min(Math.max(right, left + 0.2), width);
    if (end <= start) return;
    draw.fillStyle = style;
    draw.fillRect(start, top, end - start, bottom - top);
  }

  function place(bar) {
    const top = HEAD + bar[0] * ROW;
    return [[top + 4, top + 24], [top + 26, top + 32], [top + 34, top + 40], [top + 2, top + 42]][bar[1]];
  }

  function render() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "soft", "line", "field", "card", "blue", "orange", "green", "violet", "teal", "grey", "send", "receive", "fault", "recovery", "note"])
      paint[name] = style.getPropertyValue(`--${name}`).trim();
    width = box.clientWidth;
    gutter = width < 560 ? 74 : 112;
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height() * scale;
    canvas.style.height = `${height()}px`;
    draw.setTransform(scale, 0, 0, scale, 0, 0);
    draw.clearRect(0, 0, width, height());
    draw.font = "12px system-ui, sans-serif";
    draw.textBaseline = "middle";
    const bottom = HEAD + ROW * rows.length;
    rows.forEach((_, index) => {
      if (index % 2) return;
      draw.fillStyle = paint.field; draw.globalAlpha = 0.55;
      draw.fillRect(gutter, HEAD + index * ROW, width - gutter, ROW);
      draw.globalAlpha = 1;
    });
    for (const [value, text] of ticks()) {
      draw.fillStyle = paint.line; draw.fillRect(x(value), HEAD - 4, 1, bottom - HEAD + 4);
      draw.fillStyle = paint.soft; draw.textAlign = "center";
      if (x(value) < width - 22) draw.fillText(`${text} s`, Math.max(x(value), gutter + 14), HEAD / 2 - 2);
    }
    rows.forEach((row, index) => {
      draw.textAlign = "left"; draw.fillStyle = paint.ink; draw.font = "600 12.5px system-ui, sans-serif";
      draw.fillText(data.devices[index], 0, HEAD + index * ROW + 14, gutter - 8);
      draw.font = "10px system-ui, sans-serif"; draw.fillStyle = paint.soft;
      draw.fillText("send / receive", 0, HEAD + index * ROW + 33, gutter - 8);
      draw.font = "11px system-ui, sans-serif";
      for (const bar of row) {
        const end = bar[2] + bar[3];
        if (end < from || bar[2] > to) continue;
        const [high, low] = place(bar);
        if (bar[1] === 3) down(x(bar[2]), high, x(end), low, data.words[bar[4]]);
        else rectangle(tint(bar), x(bar[2]), high, x(end), low);
        if (bar[9]) rectangle(paint.fault, x(end) - 2, high, x(end), low);
        if (bar[1] === 0 && x(end) - x(bar[2]) > 30 && x(bar[2]) >= gutter) {
          draw.fillStyle = paint.card; draw.textAlign = "center";
          draw.fillText(bar[5] == null ? data.words[bar[4]] : bar[6] == null ? `${bar[5]}` : `${bar[5]}.${bar[6]}`, (x(bar[2]) + Math.min(x(end), width)) / 2, (high + low) / 2);
        }
      }
    });
    for (const frame of data.windows) {
      if (frame.end < from || frame.start > to) continue;
      draw.globalAlpha = 0.13;
      rectangle(paint[frame.style], x(frame.start), HEAD, Math.max(x(frame.end), x(frame.start) + 2), bottom);
      draw.globalAlpha = 1;
      rectangle(paint[frame.style], x(frame.start), HEAD - 3, Math.max(x(frame.end), x(frame.start) + 2), HEAD);
    }
    if (drag && Math.abs(drag.now - drag.start) > 3) {
      draw.globalAlpha = 0.2;
      rectangle(paint.note, Math.min(drag.start, drag.now), HEAD, Math.max(drag.start, drag.now), bottom);
      draw.globalAlpha = 1;
    }
  }

  function down(left, top, right, bottom, text) {
    draw.globalAlpha = 0.3;
    rectangle(paint.fault, left, top, right, bottom);
    draw.globalAlpha = 1;
    if (right - left < 40) return;
    draw.fillStyle = paint.fault; draw.textAlign = "center";
    draw.fillText(text === "kill" ? "down" : "frozen", (Math.max(left, gutter) + Math.min(right, width)) / 2, (top + bottom) / 2);
  }

  const tint = bar => bar[1] === 0 ? paint[colour.get(bar[4])] : bar[1] === 1 ? paint.send : paint.receive;

  function under(place_x, place_y) {
    const index = Math.floor((place_y - HEAD) / ROW);
    if (index < 0 || index >= rows.length || place_x < gutter) return null;
    const at = seconds(place_x), near = 3 * (to - from) / (width - gutter);
    let best = null;
    for (const bar of rows[index]) {
      if (bar[2] - near > at) break;
      if (bar[1] < 3 && bar[2] + longest[index] + near < at) continue;
      const [high, low] = place(bar);
      if (bar[2] + bar[3] + near >= at && place_y >= high - 1 && place_y <= low + 1) {
        if (!best || bar[1] < 3 || best[1] === 3) best = bar;
      }
    }
    return best;
  }

  function explain(event) {
    const area = canvas.getBoundingClientRect();
    const bar = under(event.clientX - area.left, event.clientY - area.top);
    tip.hidden = !bar;
    if (!bar) return;
    const kind = data.kinds[bar[1]];
    const title = document.createElement("b");
    title.textContent = kind === "down" ? `${data.devices[bar[0]]} is down` : `${kind === "compute" ? "" : kind + " "}${data.words[bar[4]]}${bar[5] == null ? "" : `, batch ${bar[5]}`}${bar[6] == null ? "" : `, micro-batch ${bar[6]}`}`;
    const lines = [`${duration(bar[3])}, from ${bar[2].toFixed(4)} s`];
    if (bar[7] != null) lines.push(`${kind === "send" ? "to" : "from"} ${data.words[bar[7]]}${bar[8] == null ? "" : `, ${bytes(bar[8])}`}`);
    if (bar[9]) lines.push("interrupted by the fault");
    tip.replaceChildren(title, ...lines.flatMap(line => [line, document.createElement("br")]));
    const left = event.clientX - area.left, room = width - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(left + 14, room))}px`;
    tip.style.top = `${event.clientY - area.top + 16}px`;
  }

  const tools = box.parentElement.querySelector(".tools");
  const buttons = data.views.map(view => {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = view.name; button.view = view;
    button.addEventListener("click", () => show(view.start, view.end));
    tools.append(button);
    return button;
  });
  const gap = document.createElement("span");
  gap.className = "gap";
  tools.append(gap);
  const zoom = factor => { const middle = (from + to) / 2, half = (to - from) / 2 * factor; show(middle - half, middle + half); };
  const pan = part => show(from + (to - from) * part, to + (to - from) * part);
  for (const [sign, name, act] of [["←", "earlier", () => pan(-0.4)], ["→", "later", () => pan(0.4)], ["+", "closer", () => zoom(0.5)], ["−", "wider", () => zoom(2)]]) {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = sign; button.title = name; button.setAttribute("aria-label", name);
    button.addEventListener("click", act);
    tools.append(button);
  }
  canvas.addEventListener("pointerdown", event => {
    const start = event.offsetX;
    if (start < gutter || event.button) return;
    drag = {start, now: start};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!drag) return explain(event);
    drag.now = event.offsetX;
    render();
  });
  canvas.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (!done) return;
    if (Math.abs(done.now - done.start) > 3) show(seconds(Math.min(done.start, done.now)), seconds(Math.max(done.start, done.now)));
    else render();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", () => show(0, data.end));
  canvas.addEventListener("keydown", event => {
    const act = {ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "-": () => zoom(2), Escape: () => show(0, data.end)}[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const key = box.parentElement.querySelector(".key");
  const entries = spans.map(span => [data.words[span], colour.get(span)]);
  if (data.bars.some(bar => bar[1] === 1)) entries.push(["send", "send"]);
  if (data.bars.some(bar => bar[1] === 2)) entries.push(["receive", "receive"]);
  if (data.windows.some(frame => frame.style === "fault")) entries.push(["fault", "fault"]);
  if (data.windows.some(frame => frame.style === "recovery")) entries.push(["recovering", "recovery"]);
  for (const [text, name] of entries) {
    const item = document.createElement("span");
    item.textContent = text; item.style.setProperty("--swatch", `var(--${name})`);
    key.append(item);
  }
  new ResizeObserver(() => { if (box.clientWidth !== width) render(); }).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  const wanted = data.views.find(view => `#${view.name.replaceAll(" ", "-")}` === location.hash) ?? data.views[0];
  if (wanted) show(wanted.start, wanted.end);
})();
