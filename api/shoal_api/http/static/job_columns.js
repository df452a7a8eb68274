// Which columns the table has: the usual ones, or any names that conditions can use. Also how a value of a column is shown.
import { $, element, fillEach } from "./dom.js";
import { request } from "./api.js";
import { brief, moment, whole } from "./format.js";
import { bare, split } from "./job_query.js";

const kinds = new Map(); // name -> kind
let fields = null;

export function setUpColumns(view, change) {
  $("choose-columns").addEventListener("click", async () => {
    const opens = $("columns").hidden;
    $("columns").hidden = !opens;
    $("choose-columns").setAttribute("aria-expanded", String(opens));
    if (!opens) return;
    await load();
    list(view, change);
    $("column-search").focus();
  });
  $("column-search").addEventListener("input", () => list(view, change));
  $("usual-columns").addEventListener("click", () => {
    change({ columns: "", sort: "" });
    list(view, change);
  });
  if (view.columns) load();
}

async function load() {
  fields ??= (await request("/v1/job-fields")).items;
  for (const { name, kind } of fields) kinds.set(bare(name), kind);
}

function list(view, change) {
  const word = $("column-search").value.trim().toLowerCase(),
    now = split(view.columns);
  const typed = word.includes("(") && word.endsWith(")") ? [word] : []; // max(loss): of all steps, no name of the list
  const known = [
    ...[...new Set([...now, ...typed])]
      .filter((name) => !fields.some((one) => one.name === name))
      .map((name) => ({ name, meaning: "" })),
    ...fields,
  ];
  const found = known.filter(({ name, meaning }) => !word || `${name} ${meaning}`.toLowerCase().includes(word));
  fillEach("column-list", found, ({ name, meaning }) => {
    const box = element("input", null, {
      type: "checkbox",
      "data-column": name,
      click: () => {
        const before = split(view.columns);
        change({ columns: (box.checked ? [...before, name] : before.filter((one) => one !== name)).join(",") });
      },
    });
    box.checked = now.includes(name);
    return element("li", element("label", [box, ` ${name}`], { title: meaning || undefined }));
  });
}

export function shownValue(name, value) {
  if (value === undefined || value === null) return "–";
  if (kinds.get(name) === "time" || ["created", "updated", "started", "ended"].includes(name))
    return element("span", brief(value), { title: moment(value) });
  if (typeof value === "number") return Number.isInteger(value) ? whole(value) : String(Number(value.toPrecision(6)));
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "string" ? value : JSON.stringify(value);
}
