// The Gantt chart of testbed_controller/report/timeline.py: a row per device, with computations above, sends and receptions
// below. Drag to zoom, double-click for the whole run. Times are in seconds, positions and sizes in pixels.
(() => {
  const source = document.getElementById("timeline");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const box = document.querySelector(".gantt");
  const canvas = box.querySelector("canvas");
  const tip = box.querySelector(".tip");
  const draw = canvas.getContext("2d");
  // Heights of a row and of the axis above the rows.
  const ROW = 46, HEAD = 24;
  // Top and bottom of a bar in its row.
  const EDGES = {compute: [4, 24], send: [26, 32], receive: [34, 40], down: [2, 42]};
  const NAMED = {forward: "blue", infer: "blue", backward: "orange", update: "green", evaluate: "violet", test: "violet"};
  const OTHERS = ["teal", "grey", "green"];
  const bars = data.bars.map(([device, kind, start, duration, label, batch, micro, peer, size, interrupted]) => ({
    device, kind: data.kinds[kind], start, end: start + duration, duration, label: data.words[label], batch, micro,
    peer: data.words[peer], size, interrupted,
  }));
  const rows = data.devices.map(() => []);
  for (const bar of bars) rows[bar.device].push(bar);
  // The longest bar of each row, without outages.
  const longest = rows.map(row => row.reduce((most, bar) => Math.max(most, bar.kind === "down" ? 0 : bar.duration), 0));
  const spans = [...new Set(bars.filter(bar => bar.kind === "compute").map(bar => bar.label))];
  // Computations with usual names have fixed colours, all others the next of the remaining colours.
  const colour = new Map();
  let other = 0;
  for (const span of spans) {
    const known = Object.keys(NAMED).find(name => span.startsWith(name));
    colour.set(span, known ? NAMED[known] : OTHERS[other++ % OTHERS.length]);
  }
  // The shown part of the run.
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

  function edges(bar) {
    const row = HEAD + bar.device * ROW;
    const [top, bottom] = EDGES[bar.kind];
    return [row + top, row + bottom];
  }

  function number(bar) {
    if (bar.batch == null) return bar.label;
    return bar.micro == null ? `${bar.batch}` : `${bar.batch}.${bar.micro}`;
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
        if (bar.end < from || bar.start > to) continue;
        const [top, bottom] = edges(bar), left = x(bar.start), right = x(bar.end);
        if (bar.kind === "down") outage(left, top, right, bottom, bar.label);
        else rectangle(tint(bar), left, top, right, bottom);
        if (bar.interrupted) rectangle(paint.fault, right - 2, top, right, bottom);
        if (bar.kind === "compute" && right - left > 30 && left >= gutter) {
          draw.fillStyle = paint.card; draw.textAlign = "center";
          draw.fillText(number(bar), (left + Math.min(right, width)) / 2, (top + bottom) / 2);
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

  function outage(left, top, right, bottom, action) {
    draw.globalAlpha = 0.3;
    rectangle(paint.fault, left, top, right, bottom);
    draw.globalAlpha = 1;
    if (right - left < 40) return;
    draw.fillStyle = paint.fault; draw.textAlign = "center";
    draw.fillText(action === "kill" ? "down" : "frozen", (Math.max(left, gutter) + Math.min(right, width)) / 2, (top + bottom) / 2);
  }

  const tint = bar => bar.kind === "compute" ? paint[colour.get(bar.label)] : paint[bar.kind];

  // The bar at a position; null without one.
  function bar_at(place_x, place_y) {
    const index = Math.floor((place_y - HEAD) / ROW);
    if (index < 0 || index >= rows.length || place_x < gutter) return null;
    // Also a bar up to three pixels away, since many bars are narrower than a pixel.
    const time = seconds(place_x), near = 3 * (to - from) / (width - gutter);
    let best = null;
    // The bars of a row are in the order of their starts.
    for (const bar of rows[index]) {
      if (bar.start - near > time) break;
      if (bar.kind !== "down" && bar.start + longest[index] + near < time) continue;
      const [top, bottom] = edges(bar);
      if (bar.end + near >= time && place_y >= top - 1 && place_y <= bottom + 1) {
        // An outage is behind the other bars.
        if (!best || bar.kind !== "down" || best.kind === "down") best = bar;
      }
    }
    return best;
  }

  function describe(bar) {
    if (bar.kind === "down") return `${data.devices[bar.device]} is down`;
    let text = bar.kind === "compute" ? bar.label : `${bar.kind} ${bar.label}`;
    if (bar.batch != null) text += `, batch ${bar.batch}`;
    if (bar.micro != null) text += `, micro-batch ${bar.micro}`;
    return text;
  }

  function explain(event) {
    const area = canvas.getBoundingClientRect();
    const bar = bar_at(event.clientX - area.left, event.clientY - area.top);
    tip.hidden = !bar;
    if (!bar) return;
    const title = document.createElement("b");
    title.textContent = describe(bar);
    const lines = [`${duration(bar.duration)}, from ${bar.start.toFixed(4)} s`];
    if (bar.peer != null) lines.push(`${bar.kind === "send" ? "to" : "from"} ${bar.peer}${bar.size == null ? "" : `, ${bytes(bar.size)}`}`);
    if (bar.interrupted) lines.push("interrupted by the fault");
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
  const entries = spans.map(span => [span, colour.get(span)]);
  if (bars.some(bar => bar.kind === "send")) entries.push(["send", "send"]);
  if (bars.some(bar => bar.kind === "receive")) entries.push(["receive", "receive"]);
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
