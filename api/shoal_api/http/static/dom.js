// Elements made of text. Data of the service are written as text only, never as markup.
export const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// element("td", "text" | node | [nodes], { class: "dim", title: "...", click: f })
export function element(name, content, { click, ...attributes } = {}) {
  const made = document.createElement(name);
  const parts = content === undefined || content === null ? [] : [content].flat();
  made.append(...parts.map((part) => part instanceof Node ? part : String(part)));
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  if (click) made.addEventListener("click", click);
  return made;
}

export function svg(name, attributes, children = []) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const row = (cells, attributes = {}) => element("tr", cells.map((cell) => cell instanceof HTMLTableCellElement ? cell : element("td", cell)), attributes);
export const link = (text, href, attributes = {}) => element("a", text, { href, ...attributes });
export const fill = (id, rows) => $(id).replaceChildren(...rows);
export const facts = (pairs) => pairs.map(([name, value]) => element("div", [element("dt", name), element("dd", value)]));

// Replaces the children only if the text differs, so that a selection or the focus in it survives.
export function refill(target, rows) {
  const made = element("div", rows);
  if (target.dataset.shown !== made.textContent) { target.dataset.shown = made.textContent; target.replaceChildren(...rows); }
}
