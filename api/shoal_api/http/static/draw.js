// Drawing for the page of jobs: numbers as text, elements, curves, stripes. It reads nothing from the service.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const CATEGORIES = ["productive", "recomputed", "checkpoint_stall", "recovering", "resizing", "degraded", "starting", "queued", "idle"];
const PHASES = ["detect", "quiesce", "plan", "form", "restore", "first_step"];

const number = (value, digits = 4) => value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString();
const seconds = (value) => value === null || value === undefined ? "–" : value < 90 ? `${number(value, 3)} s`
  : value < 5400 ? `${number(value / 60, 3)} min` : `${number(value / 3600, 3)} h`;
const percent = (share) => share === null || share === undefined ? "–" : `${number(100 * share, share < 0.1 ? 2 : 3)} %`;
const bytes = (count) => count === null || count === undefined ? "–" : count < 2 ** 20 ? `${number(count / 1024, 3)} KiB`
  : count < 2 ** 30 ? `${number(count / 2 ** 20, 3)} MiB` : `${number(count / 2 ** 30, 3)} GiB`;
const words = (name) => name.replaceAll("_", " ");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text instanceof Node) made.append(text); else if (text !== undefined) made.textContent = String(text);
  if (className) made.className = className;
  return made;
}

function draw(svg, points, { hits, area }) {
  const [width, height, left, bottom, top] = [900, svg.viewBox.baseVal.height, 52, 20, 8];
  const add = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  svg.replaceChildren();
  if (!points.length) { add("text", { x: left, y: height / 2 }, "no steps yet"); return; }
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const values = points.map((point) => point[1]);
  const low = area ? 0 : Math.min(...values), high = Math.max(...values, low + 1e-9);
  const x = (step) => left + (width - left - 8) * (last === first ? 0.5 : (step - first) / (last - first));
  const y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low));
  for (const value of area ? [0, high] : [low, (low + high) / 2, high]) {
    add("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "grid" });
    add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 3));
  }
  for (const step of [first, last]) add("text", { x: x(step), y: height - 4, "text-anchor": step === first ? "start" : "end" }, `step ${step}`);
  for (const step of hits) add("line", { x1: x(step), x2: x(step), y1: top, y2: height - bottom, class: "hit" });
  if (!area) { add("polyline", { points: points.map(([s, v]) => `${x(s)},${y(v)}`).join(" "), class: "curve" }); return; }
  const stairs = points.flatMap(([s, v], index) => [`${x(index ? s : first)},${y(index ? points[index - 1][1] : v)}`, `${x(s)},${y(v)}`]);
  add("polygon", { points: [`${x(first)},${y(0)}`, ...stairs, `${x(last)},${y(0)}`].join(" "), class: "area" });
}

function stripe(svg, parts, width, height) {
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  let left = 0;
  svg.replaceChildren(...parts.map(([name, amount]) => {
    const rect = document.createElementNS(SVG, "rect");
    const wide = total ? width * amount / total : 0;
    for (const [attribute, value] of Object.entries({ x: left, y: 0, width: wide, height, class: `part ${name}` })) rect.setAttribute(attribute, value);
    const title = document.createElementNS(SVG, "title");
    title.textContent = `${words(name)} ${seconds(amount)}`;
    rect.append(title);
    left += wide;
    return rect;
  }));
}

function key(name, amount = "", detail = "") {
  const made = element("li", element("span", undefined, `swatch ${name}`));
  made.append(words(name), element("span", amount, "dim"), element("span", detail && `(${detail})`, "dim"));
  return made;
}
