// A cursor on every line chart: the values of all lines nearest to the pointer.
for (const svg of document.querySelectorAll("svg.chart[data-chart]")) {
  const data = JSON.parse(svg.dataset.chart);
  const cursor = svg.querySelector(".cursor");
  const make = (name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    cursor.append(node);
    return node;
  };
  const span = data.end - data.begin;
  const across = at => data.left + (at - data.begin) / span * (data.right - data.left);
  const nearest = (points, seconds) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < seconds) low = middle; else high = middle;
    }
    return seconds - points[low][0] < points[high][0] - seconds ? points[low] : points[high];
  };
  svg.addEventListener("pointermove", event => {
    cursor.replaceChildren();
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    if (!data.lines.length || point.x < data.left || point.x > data.right) return;
    const seconds = data.begin + (point.x - data.left) / (data.right - data.left) * span;
    const found = data.lines.map(line => [line, nearest(line.points, seconds)]);
    const at = found[0][1][0];
    make("line", {x1: across(at), x2: across(at), y1: data.top, y2: data.bottom});
    const place = data.unit === "seconds" ? `${at.toFixed(2)} s` : `${data.unit} ${at}`;
    const rows = [place, ...found.map(([line, hit]) => `${line.name} ${hit[2]}`)];
    const width = 16 + 6.6 * Math.max(...rows.map(row => row.length));
    const left = across(at) + 10 + width > data.right ? across(at) - 10 - width : across(at) + 10;
    make("rect", {class: "box", x: left, y: data.top + 20, width, height: 10 + 16 * rows.length, rx: 6});
    rows.forEach((row, index) => make("text", {x: left + 8, y: data.top + 37 + 16 * index}, row));
    for (const [line, hit] of found) make("circle", {class: line.style, cx: across(hit[0]), cy: hit[1], r: 4});
  });
  svg.addEventListener("pointerleave", () => cursor.replaceChildren());
}
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "copied";
  });
}
