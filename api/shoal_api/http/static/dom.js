// Elements made of text. Data of the service are written as text only, never as markup.
export const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// element("td.title", "text" | node | [parts], { title: "...", click: act }): classes follow the name. Parts may be lists; those
// that are null, undefined or false are left out. A function is called at the event of its name.
export function element(name, content, attributes = {}) {
  const [tag, ...classes] = name.split("."),
    made = document.createElement(tag);
  made.classList.add(...classes);
  made.append(...present([content]).map((part) => (part instanceof Node ? part : String(part))));
  for (const [key, value] of Object.entries(attributes))
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  return made;
}

export const present = (parts) =>
  parts.flat(Infinity).filter((part) => part !== null && part !== undefined && part !== false);

export function svg(name, attributes, children = []) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
// What a shape says under the pointer.
export const hint = (text) => svg("title", {}, [text]);
// A picture that is stretched to its place, of shapes in a box of these units.
export const picture = (width, height, label, shapes, attributes = {}) =>
  svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label, ...attributes },
    shapes,
  );
export const bar = (words, x, y, width, height, attributes) =>
  svg("rect", { x, y, width, height, ...attributes }, words ? [hint(words)] : []);

export const button = (words, click, attributes = {}) =>
  element("button", words, { type: "button", click, ...attributes });

// Words beside what matters: in the line, or in one of their own.
export const small = (content) => element("span.dim.small", content);
export const smallLine = (content) => element("div.dim.small", content);

// A text that is said in the colour of what it means.
export function say(id, text, look) {
  $(id).textContent = text;
  $(id).className = look;
}

// A text that has its place only if there is one.
export function showText(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

// Does what a control is for; what goes wrong is said in an element. The control cannot be used meanwhile, nor after it: the page is left.
export async function attempt(act, saidIn, control = null) {
  const usable = (is) => {
    if (control) $(control).disabled = !is;
  };
  usable(false);
  say(saidIn, "", "");
  try {
    await act();
    return true;
  } catch (error) {
    say(saidIn, error.message, "error");
    usable(true);
    return false;
  }
}

// Words of any length in a cell of a table: they take lines of their own instead of all its width.
export const said = (text, more = "") => element("div", text, { class: `said ${more}` });
// A row of cells; an object among them has attributes of the row.
export const row = (cells) => {
  const made = cells
    .filter((cell) => !isPlainObject(cell))
    .map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", cell)));
  return element("tr", made, Object.assign({}, ...cells.filter(isPlainObject)));
};
const isPlainObject = (value) => value?.constructor === Object;
// A table that is made as a whole; its caption is for those who do not see what is above it.
export const table = (caption, heads, rows) =>
  element("table", [
    element("caption.unseen", caption),
    element("thead", row(heads.map((head) => element("th", head, { scope: "col" })))),
    element("tbody", rows),
  ]);
export const progress = (value, max, name) => element("progress", null, { value, max, "aria-label": name });
export const link = (text, href, attributes = {}) => element("a", text, { href, ...attributes });
export const facts = (pairs) =>
  pairs.filter(Boolean).map(([name, value]) => element("div", [element("dt", name), element("dd", value)]));

// The browser does not send a form: act() does what it is for.
export const onSubmit = (id, act) =>
  $(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });

// Replaces the children. If one of their controls had the focus, the control that takes its place gets it. Each cell of a
// table of cards gets the name of its column: on a narrow screen it stands before the value, and the heads are hidden. A table
// without rows is hidden, and the words with data-instead-of are shown in its place.
export function fill(id, content) {
  const rows = present([content]);
  const isEmpty = $(id).tagName === "TBODY" && !rows.length;
  $(id).closest("table.cards")?.toggleAttribute("hidden", isEmpty);
  document.querySelector(`[data-instead-of="${id}"]`)?.toggleAttribute("hidden", !isEmpty);
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

// The same with what make(item) returns for each of the items.
export const fillEach = (id, items, make) => fill(id, items.map(make));

// The rows of a table or list, one for each of the items: its cells, and attributes of the row.
export const rows = (id, items, cells) => fillEach(id, items, (...item) => row(cells(...item)));

// Facts that change while one looks at them: only those that differ are replaced, so that a selection survives.
export function fillFacts(id, pairs) {
  const made = facts(pairs),
    shown = [...$(id).children],
    names = made.map((pair) => pair.firstChild.textContent).join();
  if ($(id).dataset.names !== names) fill(id, made);
  else
    made.forEach((one, index) => {
      if (!one.isEqualNode(shown[index])) shown[index].replaceWith(one);
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
