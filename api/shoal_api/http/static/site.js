// What every page has: the search over everything (/), the help on keys (?), and the way to the account.
import { element } from "./dom.js";
import { jobPage, modelPage, request } from "./api.js";
import { badge } from "./states.js";

const PAUSE_MS = 150, MOST = 8;
const PLACES = [["All jobs", "/"], ["Workspace", "/workspace"], ["Compare jobs", "/compare"], ["Sweeps", "/sweeps"], ["Models", "/models"], ["Fleet", "/fleet"], ["Account and tokens", "/account"], ["REST API", "/docs"], ["Runbook", "/runbook"]];
const KEYS = [["/", "search jobs, projects, nodes, sweeps, models and pages"], ["?", "this help"], ["← → Home End", "in tabs: the tab before, after, first, last"], ["↑ ↓ Enter", "in the search: choose and open"], ["Esc", "close"]];

const box = element("input", null, { type: "search", role: "combobox", "aria-expanded": "true", "aria-controls": "site-found", "aria-autocomplete": "list", "aria-label": "Search everything", placeholder: "jobs, projects, nodes, sweeps, models, pages", autocomplete: "off", spellcheck: "false" });
const list = element("ul", [], { id: "site-found", role: "listbox", "aria-label": "Found" });
const palette = element("dialog", [box, list], { class: "palette", "aria-label": "Search everything" });
const help = element("dialog", [element("h2", "Keys"), element("dl", KEYS.flatMap(([key, words]) => [element("dt", element("kbd", key)), element("dd", words)]), { class: "keys" }), element("button", "Close", { type: "button", click: () => help.close() })], { class: "help", "aria-label": "Keys" });
let turn = 0, timer = null, chosen = 0;

document.body.append(palette, help);
document.querySelector("header nav").append(element("button", "Search /", { type: "button", class: "quiet", id: "site-search", click: openPalette }), element("a", "Account", { href: "/account", ...(location.pathname === "/account" ? { "aria-current": "page" } : {}) }),
  element("button", "?", { type: "button", class: "quiet", "aria-label": "Keys", click: () => help.showModal() }));
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || event.target.closest("input, textarea, select, [contenteditable]")) return;
  if (event.key === "/") { event.preventDefault(); openPalette(); }
  if (event.key === "?") { event.preventDefault(); help.showModal(); }
}, { capture: true });
box.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, PAUSE_MS); });
box.addEventListener("keydown", (event) => {
  const options = [...list.children];
  if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); choose((chosen + (event.key === "ArrowDown" ? 1 : options.length - 1)) % Math.max(1, options.length)); }
  if (event.key === "Enter" && options[chosen]?.dataset.href) { event.preventDefault(); location.href = options[chosen].dataset.href; }
});

function openPalette() { box.value = ""; palette.showModal(); search(); }

// A part that is wider than the screen is scrolled, so the keyboard reaches it; one that fits is no stop of Tab.
const reach = new ResizeObserver((entries) => {
  for (const part of new Set(entries.map(({ target }) => target.closest(".wide")))) {
    if (!part) continue;
    if (part.scrollWidth > part.clientWidth || part.closest("details:not([open])")) part.tabIndex = 0; else part.removeAttribute("tabindex");
  }
});
for (const part of document.querySelectorAll(".wide")) for (const one of [part, ...part.querySelectorAll("table")]) reach.observe(one);

// Each source is asked for itself, so that one that is refused hides no other.
async function search() {
  const mine = ++turn, text = box.value.trim(), low = text.toLowerCase();
  const places = PLACES.filter(([name]) => name.toLowerCase().includes(low)).map(([name, href]) => ({ kind: "page", name, href }));
  const found = (await Promise.all([jobs(text), nodes(low), models(low)])).flat();
  if (mine !== turn) return;
  const all = [...found, ...places];
  list.replaceChildren(...all.map(({ kind, name, href, more }, index) => element("li", [element("span", kind, { class: "dim small" }), " ", name, " ", ...(more ? [more] : [])], { role: "option", id: `site-found-${index}`, "data-href": href, click: () => { location.href = href; } })));
  if (!all.length) list.replaceChildren(element("li", "Nothing has this in its name, id or labels.", { role: "option", "aria-disabled": "true", class: "dim" }));
  choose(0);
}

function choose(index) {
  chosen = index;
  [...list.children].forEach((one, at) => one.setAttribute("aria-selected", String(at === index)));
  box.setAttribute("aria-activedescendant", list.children[index]?.id ?? "");
  list.children[index]?.scrollIntoView({ block: "nearest" });
}

// Jobs by name, id, project, user or label; then the projects and the sweeps (labels) of those found.
async function jobs(text) {
  let items;
  try { ({ items } = await request(`/v1/overview?limit=50&search=${encodeURIComponent(text)}`)); } catch { return []; }
  const low = text.toLowerCase(), has = (name) => low && name.toLowerCase().includes(low), unique = (names) => [...new Set(names)].slice(0, MOST);
  const projects = unique(items.map((job) => job.project).filter(has)).map((name) => ({ kind: "project", name, href: `/?project=${encodeURIComponent(name)}` }));
  const sweeps = unique(items.flatMap((job) => Object.entries(job.labels ?? {})).filter(([name]) => name === "sweep").map(([name, value]) => `${name}=${value}`).filter(has)).map((name) => ({ kind: "sweep", name, href: `/sweeps?label=${encodeURIComponent(name)}` }));
  return [...items.slice(0, MOST).map((job) => ({ kind: "job", name: `${job.name} ${job.id}`, href: jobPage(job.id), more: badge(job.state) })), ...projects, ...sweeps];
}

async function nodes(low) {
  if (!low) return [];
  try {
    const { items } = await request("/v1/nodes");
    return items.filter((node) => node.ip.includes(low) || node.node_id.startsWith(low)).slice(0, MOST).map((node) => ({ kind: "node", name: `${node.ip} ${node.node_id.slice(0, 8)}`, href: "/#nodes" }));
  } catch { return []; }
}

// Models by name or alias: the version that an alias names, else the newest one of each.
async function models(low) {
  if (!low) return [];
  try {
    const { items } = await request("/v1/models"), seen = new Set();
    const newest = items.filter((one) => one.name.toLowerCase().includes(low) && !seen.has(`${one.project}/${one.name}`) && seen.add(`${one.project}/${one.name}`)).map((one) => [one, one.version]);
    const aliased = items.flatMap((one) => one.aliases.map((word) => [one, word])).filter(([one, word]) => `${one.name}@${word}`.toLowerCase().includes(low));
    return [...newest, ...aliased].slice(0, MOST).map(([one, which]) => ({ kind: "model", name: `${one.name}@${which}`, href: modelPage(one, which) }));
  } catch { return []; }
}
