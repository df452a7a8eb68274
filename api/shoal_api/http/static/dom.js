// Elements made of text. Data of the service are written as text only, never as markup.
export const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// element("td", "text" | node | [nodes], { class: "dim", title: "...", click: f })
export function element(name, content, { click, ...attributes } = {}) {
  const made = document.createElement(name);
  const parts = content === undefined || content === null ? [] : [content].flat();
  made.append(...parts.map((part) => (part instanceof Node ? part : String(part))));
  for (const [key, value] of Object.entries(attributes))
    if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  if (click) made.addEventListener("click", click);
  return made;
}

export function svg(name, attributes, children = []) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
// What a shape says under the pointer.
export const hint = (text) => svg("title", {}, [text]);

export const button = (words, click, attributes = {}) =>
  element("button", words, { type: "button", click, ...attributes });

// Words beside what matters: in the line, or in one of their own.
export const small = (content) => element("span", content, { class: "dim small" });
export const smallLine = (content) => element("div", content, { class: "dim small" });

// A text that is said in the colour of what it means.
export function say(id, text, look) {
  $(id).textContent = text;
  $(id).className = look;
}

// Words of any length in a cell of a table: they take lines of their own instead of all its width.
export const said = (text, more = "") => element("div", text, { class: `said ${more}` });
export const row = (cells, attributes = {}) =>
  element(
    "tr",
    cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", cell))),
    attributes,
  );
// A table that is made as a whole; its caption is for those who do not see what is above it.
export const table = (caption, heads, rows) =>
  element("table", [
    element("caption", caption, { class: "unseen" }),
    element("thead", row(heads.map((head) => element("th", head, { scope: "col" })))),
    element("tbody", rows),
  ]);
export const link = (text, href, attributes = {}) => element("a", text, { href, ...attributes });
export const facts = (pairs) =>
  pairs.map(([name, value]) => element("div", [element("dt", name), element("dd", value)]));

// Replaces the children. If one of their controls had the focus, the control that takes its place gets it. Each cell of a
// table of cards gets the name of its column: on a narrow screen it stands before the value, and the heads are hidden.
export function fill(id, rows) {
  $(id)
    .closest("table.cards")
    ?.toggleAttribute("hidden", $(id).tagName === "TBODY" && !rows.length);
  const focused = placeOf(document.activeElement);
  $(id).replaceChildren(...rows);
  const names = [
    ...($(id).closest("table.cards > tbody")?.parentElement.querySelectorAll("thead :is(th, td)") ?? []),
  ].map((head) => head.textContent.replace(/ [▾▴]/, ""));
  for (const one of names.length ? rows : [])
    [...one.cells].forEach((cell, index) => {
      cell.dataset.name = names[index] ?? "";
      cell.classList.toggle("unknown", cell.textContent === "–");
    });
  returnTo(focused);
}

// The rows of a table or list, one for each of the items: its cells, and attributes of the row.
export const rows = (id, items, cells, attributes = () => ({})) =>
  fill(
    id,
    items.map((...item) => row(cells(...item), attributes(...item))),
  );

// Facts that change while one looks at them: only those with another text are replaced, so that a selection survives.
export function fillFacts(id, pairs) {
  const made = facts(pairs),
    shown = [...$(id).children],
    names = pairs.map(([name]) => name).join();
  if ($(id).dataset.names !== names) fill(id, made);
  else
    made.forEach((one, index) => {
      if (one.textContent !== shown[index].textContent) shown[index].replaceWith(one);
    });
  $(id).dataset.names = names;
}

// Where a control is, so that the focus finds the way back after the control was replaced: by its words, else by its place,
// where Enter must not do harm.
export function placeOf(control) {
  const holder = control?.closest("[id]");
  return {
    control,
    holder,
    words: control && wordsOf(control),
    index: holder ? controlsIn(holder).indexOf(control) : -1,
  };
}

export function returnTo({ control, holder, words, index }) {
  if (index < 0 || control.isConnected) return;
  const found = controlsIn(holder),
    harmless = found.filter((one) => !one.classList.contains("danger"));
  (found.find((one) => wordsOf(one) === words) ?? harmless[Math.min(index, harmless.length - 1)])?.focus();
}

const controlsIn = (holder) => [...holder.querySelectorAll("a, button")];
const wordsOf = (control) => control.getAttribute("aria-label") ?? control.textContent;

// Replaces the children only if the text differs, so that a selection or the focus in it survives.
export function refill(target, rows) {
  const made = element("div", rows);
  if (target.dataset.shown !== made.textContent) {
    target.dataset.shown = made.textContent;
    target.replaceChildren(...rows);
  }
}
