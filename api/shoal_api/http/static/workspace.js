// The workspace: curves of many jobs in panels that share their axis. Its address holds the condition, or the name of a view.
import { $, element } from "./dom.js";
import { request } from "./api.js";
import { Live } from "./live.js";
import { onThemeChange } from "./theme.js";
import { positions, indexAt, unpack } from "./curve_data.js";
import { PanelGrid } from "./panel_grid.js";
import { groupsOf, RunList } from "./run_list.js";
import { apply, initial, loadViews, newPanel, setUpViews } from "./workspace_views.js";

const PAUSE_MS = 300, DETAIL_MS = 250, PLAIN = ["loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size"];
const state = initial(), jobs = new Map();  // id -> { job, curve, detail }
let order = [], total = 0, position = "", groups = [], turn = 0, asked = "", typing = null, detailing = null, view = "";
const live = new Live({ curves: (document) => { take(document, false); show(); } });
const workspace = { state, pointed: null, marked: null, shown: () => groups.filter((one) => one.isShown), curveOf: (job) => jobs.get(job.id).detail ?? jobs.get(job.id).curve,
  point(x) { if (x !== this.pointed) { this.pointed = x; grid.over(); } }, mark(key) { if (key !== this.marked) { this.marked = key; grid.over(); } }, zoomTo };
const grid = new PanelGrid(workspace, changed), list = new RunList(state, changed, (key) => workspace.mark(key));

const isMetric = (name) => PLAIN.includes(name) || /^(metric|val)\../.test(name);
const metrics = () => [...new Set(state.panels.filter(({ kind, y }) => kind === "lines" && isMetric(y)).map(({ y }) => y))].sort();
const columns = () => [...new Set([state.group, ...state.panels.filter(({ kind }) => kind !== "lines").flatMap(({ x, y }) => [x, y])].filter(Boolean))].sort();

function query(more = {}) {
  const made = new URLSearchParams({ packed: "true", limit: "200", ...more });
  for (const name of ["where", "project", "search"]) if (state[name]) made.set(name, state[name]);
  if (state.archived) made.set("archived", "true");
  if (columns().length) made.set("columns", columns().join(","));
  for (const name of metrics().length ? metrics() : ["loss"]) made.append("metric", name);
  return made;
}

// Reads everything anew if another question is to be asked than the one that the page has the answer of.
async function load() {
  const wanted = String(query()), mine = ++turn;
  if (wanted === asked) return;
  let document;
  try { document = await request(`/v1/curves?${wanted}`); } catch (error) { if (mine === turn) problem(error.message); return; }
  if (mine !== turn) return;
  problem("");
  asked = wanted;
  take(document, true);
  live.open(`/v1/curves?${query({ since: position })}`);
  show();
  detail();
}

function problem(text) { $("where-error").textContent = text; $("where-error").hidden = !text; $("where").setAttribute("aria-invalid", String(Boolean(text))); }

function take(document, isAll) {
  if (isAll) jobs.clear();
  for (const { curve, ...job } of document.items) jobs.set(job.id, { job, curve: unpack(curve), detail: null });
  order = document.ids.filter((id) => jobs.has(id)); total = document.total;
  if (isAll) position = document.position;
}

function show() {
  groups = groupsOf(order.map((id) => jobs.get(id).job), state);
  list.show(groups, total);
  grid.redraw();
}

// What was typed is taken with any change, also before the pause after it is over.
function changed() { if (typing !== null) state.where = $("where").value.trim(); forgetTyping(); remember(); grid.show(); controls(); show(); load(); }

function remember() {
  const kept = new URLSearchParams(view ? { view } : {});
  if (!view) for (const name of ["where", "project", "search"]) if (state[name]) kept.set(name, state[name]);
  history.replaceState(null, "", `/workspace${kept.size ? `?${kept}` : ""}`);
}

function zoomTo(range) {
  if (range && !(range[1] > range[0])) return;
  state.zoom = range;
  $("unzoom").disabled = !range;
  for (const one of jobs.values()) if (!range) one.detail = null;
  grid.redraw();
  detail();
}

// Zoomed in, more points of that part are asked for, of the jobs that are drawn; until they come, those that are known are shown.
function detail() {
  clearTimeout(detailing);
  if (!state.zoom) return;
  detailing = setTimeout(async () => {
    const zoom = state.zoom, mine = turn, drawn = workspace.shown().flatMap(({ members }) => members);
    let after = Infinity, until = -1;
    for (const job of drawn) {
      const { curve } = jobs.get(job.id), xs = positions(job, curve, state.axis);
      if (!xs?.length) continue;
      after = Math.min(after, curve.step[Math.max(0, indexAt(xs, zoom[0]) - 2)] - 1); until = Math.max(until, curve.step[Math.min(xs.length - 1, indexAt(xs, zoom[1]) + 1)]);
    }
    if (!(until > after)) return;
    const parameters = query({ after_step: Math.max(-1, after), until_step: until, points: drawn.length > 20 ? 60 : 250 });
    for (const job of drawn) parameters.append("job", job.id);
    let found;
    try { found = await request(`/v1/curves?${parameters}`); } catch { return; }  // the points that are known stay
    if (zoom !== state.zoom || mine !== turn) return;
    for (const { id, curve } of found.items) { const one = jobs.get(id), finer = unpack(curve); if (one && finer.step.length > 1) one.detail = finer; }
    grid.redraw();
  }, DETAIL_MS);
}

function controls() {
  for (const name of ["where", "axis", "smoothing", "group"]) if (document.activeElement !== $(name)) $(name).value = state[name];
  $("log-x").checked = state.log_x; $("unzoom").disabled = !state.zoom;
}

function forgetTyping() { clearTimeout(typing); typing = null; }

async function open(key) {
  forgetTyping();
  const found = key && (await request("/v1/views")).items.find((one) => `${one.project}/${one.name}` === key);
  view = found ? key : "";
  if (found) apply(state, found.view);
  if (key && !found) problem(`There is no view ${key}, or its project is hidden from you.`);
  grid.panels.forEach(({ section }) => section.remove()); grid.panels.clear(); grid.inView.clear();
  changed();
  $("title").textContent = found ? found.name : "Workspace";
}

$("where").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(changed, PAUSE_MS); });
$("conditions").addEventListener("submit", (event) => event.preventDefault());
$("axis").addEventListener("change", () => { state.axis = $("axis").value; state.zoom = null; for (const one of jobs.values()) one.detail = null; changed(); });
$("smoothing").addEventListener("input", () => { state.smoothing = Number($("smoothing").value); grid.redraw(); });
$("log-x").addEventListener("change", () => { state.log_x = $("log-x").checked; grid.redraw(); });
$("group").addEventListener("change", () => { state.group = $("group").value.trim(); state.hidden.clear(); state.colours = {}; changed(); });
$("unzoom").addEventListener("click", () => zoomTo(null));
$("kind").addEventListener("change", () => { $("of-x").hidden = $("kind").value !== "scatter"; });
$("add").addEventListener("submit", (event) => {
  event.preventDefault();
  const kind = $("kind").value, y = $("y").value.trim(), x = kind === "scatter" ? $("x").value.trim() : "";
  if (kind === "lines" && !isMetric(y)) { problem(`${y || "nothing"} is no metric of a curve: write one of ${PLAIN.join(", ")}, metric.NAME or val.NAME.`); return; }
  if (!y || (kind === "scatter" && !x)) { problem("A panel needs a name for each of its axes."); return; }
  state.panels.push(newPanel(y, { kind, x }));
  $("y").value = $("x").value = "";
  changed();
});
onThemeChange(() => grid.redraw());
addEventListener("resize", () => grid.redraw());
setUpViews(state, open, (key) => { view = key; remember(); });
const address = new URLSearchParams(location.search);
for (const name of ["where", "project", "search"]) state[name] = address.get(name) ?? "";
(address.get("view") ? open(address.get("view")) : Promise.resolve(changed())).then(async () => {
  await loadViews(view);
  $("names").replaceChildren(...[...PLAIN.map((name) => ({ name })), ...(await request("/v1/job-fields")).items].map(({ name }) => element("option", null, { value: name })));
});
