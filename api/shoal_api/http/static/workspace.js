// The workspace: curves of many jobs in panels that share their axis. Its address holds all that is chosen, or the name of a view.
import { $, onSubmit } from "./dom.js";
import { request } from "./api.js";
import { Live } from "./live.js";
import { offer } from "./address.js";
import { onThemeChange } from "./looks.js";
import { indexAt, positions, unpack } from "./curve_data.js";
import { PanelGrid } from "./panel_grid.js";
import { isMetric, offerNames, setUpNewPanel } from "./new_panel.js";
import { groupsOf, RunList } from "./run_list.js";
import { apply, applyAddress, initial, offerProjects, setUpViews, showViews, toText } from "./workspace_views.js";
import { loadViews, savedView, showProblem } from "./views.js";

const PAUSE_MS = 300,
  DETAIL_MS = 250,
  COARSE = 8,
  POINTS = 60;
const state = initial(),
  jobs = new Map(); // id -> { job, curve, detail }
let order = [],
  total = 0,
  position = "",
  groups = [],
  turn = 0,
  asked = "",
  asking = "",
  typing = null,
  detailing = null,
  view = "";
const live = new Live({
  curves: (document) => {
    take(document, false);
    show();
  },
});
const workspace = {
  state,
  version: 0,
  pointed: null,
  marked: null,
  shown: () => groups.filter((one) => one.isShown),
  curveOf: (job) => jobs.get(job.id).detail ?? jobs.get(job.id).curve,
  point(x) {
    if (x !== this.pointed) {
      this.pointed = x;
      grid.over();
    }
  },
  mark(key) {
    if (key !== this.marked) {
      this.marked = key;
      grid.over();
    }
  },
  zoomTo,
};
const grid = new PanelGrid(workspace, changed),
  list = new RunList(state, changed, (key) => workspace.mark(key));

const sorted = (names) => [...new Set(names.filter(Boolean))].sort();
const panelsOf = (areLines) => state.panels.filter(({ kind }) => (kind === "lines") === areLines);
const metrics = () => sorted([...panelsOf(true).map(({ y }) => y), state.axis].filter(isMetric));
const columns = () => sorted([state.group, ...panelsOf(false).flatMap(({ x, y }) => [x, y])]);

function query(more = {}) {
  const made = new URLSearchParams({ packed: "true", limit: String(state.limit), ...more });
  for (const name of ["where", "project", "search"]) if (state[name]) made.set(name, state[name]);
  if (state.archived) made.set("archived", "true");
  if (columns().length) made.set("columns", columns().join(","));
  for (const name of metrics().length ? metrics() : ["loss"]) made.append("metric", name);
  return made;
}

// Reads everything anew if the question is another one. An empty page first gets few points of each curve, an eighth of the work.
async function load() {
  const wanted = String(query());
  if (wanted === (asking || asked)) {
    detail();
    return;
  }
  const mine = ++turn;
  asking = wanted;
  for (const points of jobs.size ? [POINTS] : [COARSE, POINTS]) {
    let document;
    try {
      document = await request(`/v1/curves?${query({ points })}`);
    } catch (error) {
      if (mine === turn) {
        asking = "";
        showProblem(error.message);
      }
      return;
    }
    if (mine !== turn) return;
    showProblem("");
    grid.isCoarse = points === COARSE;
    take(document, true);
    show();
    if (points === COARSE) await grid.drawn(); // the next answer does not compete with the picture for the machine
  }
  asked = wanted;
  asking = "";
  live.open(`/v1/curves?${query({ since: position })}`);
  detail();
}

function take(document, isAll) {
  if (isAll) jobs.clear();
  for (const { curve, ...job } of document.items) jobs.set(job.id, { job, curve: unpack(curve), detail: null });
  order = document.ids.filter((id) => jobs.has(id));
  total = document.total;
  if (isAll) position = document.position;
}

function show() {
  workspace.version += 1;
  groups = groupsOf(
    order.map((id) => jobs.get(id).job),
    state,
  );
  list.show(groups, total);
  grid.redraw();
}

// What was typed is taken with any change, also before the pause after it is over.
function changed() {
  if (typing !== null) state.where = $("where").value.trim();
  forgetTyping();
  remember();
  grid.show();
  controls();
  show();
  return load();
}
function forgetTyping() {
  clearTimeout(typing);
  typing = null;
}

function remember() {
  const kept = new URLSearchParams(view ? { view } : {});
  if (!view) for (const name of ["where", "project", "search"]) if (state[name]) kept.set(name, state[name]);
  const address = `/workspace${kept.size ? `?${kept}` : ""}${view ? "" : toText(state)}`;
  if (address !== location.pathname + location.search + location.hash) history.replaceState(null, "", address);
}

function zoomTo(range) {
  if (range && !(range[1] > range[0])) return;
  state.zoom = range;
  $("unzoom").disabled = !range;
  remember();
  if (!range) dropDetail();
  grid.redraw();
  detail();
}

function dropDetail() {
  workspace.version += 1;
  for (const one of jobs.values()) one.detail = null;
}

// Zoomed in, more points of that part are asked for, of the jobs that are drawn; until they come, those that are known are shown.
function detail() {
  clearTimeout(detailing);
  if (!state.zoom || isMetric(state.axis)) return;
  detailing = setTimeout(async () => {
    const zoom = state.zoom,
      mine = turn,
      drawn = workspace.shown().flatMap(({ members }) => members);
    let after = Infinity,
      until = -1;
    for (const job of drawn) {
      const { curve } = jobs.get(job.id),
        xs = positions(job, curve, state.axis);
      if (!xs?.length) continue;
      after = Math.min(after, curve.step[Math.max(0, indexAt(xs, zoom[0]) - 2)] - 1);
      until = Math.max(until, curve.step[Math.min(xs.length - 1, indexAt(xs, zoom[1]) + 1)]);
    }
    if (!(until > after)) return;
    const parameters = query({
      after_step: Math.max(-1, after),
      until_step: until,
      points: drawn.length > 20 ? 60 : 250,
    });
    for (const job of drawn) parameters.append("job", job.id);
    const found = await request(`/v1/curves?${parameters}`).catch(() => null);
    if (!found || zoom !== state.zoom || mine !== turn) return; // without an answer the points that are known stay
    for (const { id, curve } of found.items) {
      const one = jobs.get(id),
        finer = unpack(curve);
      if (one && finer.step.length > 1) one.detail = finer;
    }
    workspace.version += 1;
    grid.redraw();
  }, DETAIL_MS);
}

function controls() {
  offer($("axis"), [state.axis]);
  for (const name of ["where", "axis", "smoothing", "group", "band", "limit"])
    if (document.activeElement !== $(name) && !(name === "where" && typing !== null)) $(name).value = state[name];
  offer($("project"), [state.project]);
  $("project").value = state.project;
  $("of-band").hidden = !state.group;
  $("log-x").checked = state.log_x;
  $("unzoom").disabled = !state.zoom;
}

async function open(key) {
  forgetTyping();
  if (key) await loadViews();
  const found = savedView(key);
  view = found ? key : "";
  if (found) apply(state, found.view);
  grid.panels.forEach(({ section }) => section.remove());
  grid.panels.clear();
  grid.inView.clear();
  showViews(view, state.project);
  $("title").textContent = found ? found.name : "Workspace";
  await changed();
  if (key && !found) showProblem(`There is no view ${key}, or its project is hidden from you.`);
}

$("where").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(changed, PAUSE_MS);
});
onSubmit("conditions", () => {});
// A control whose value is one of the state: act() shows what depends on it.
const takes = (name, event, act, value = (control) => control.value) =>
  $(name).addEventListener(event, () => {
    if (!$(name).reportValidity()) return;
    state[name.replace("-", "_")] = value($(name));
    act();
  });
const redrawn = () => {
  workspace.version += 1;
  remember();
  grid.redraw();
};
takes("axis", "change", () => {
  state.zoom = null;
  dropDetail();
  changed();
});
takes("smoothing", "input", redrawn, ({ value }) => Number(value));
takes("band", "change", redrawn);
takes("log-x", "change", redrawn, ({ checked }) => checked);
takes("limit", "change", changed, ({ value }) => Number(value));
takes("project", "change", () => {
  showViews(view, state.project);
  changed();
});
const ungroup = () => {
  state.hidden.clear();
  state.colours = {};
  changed();
};
takes("group", "change", ungroup, ({ value }) => value.trim());
$("unzoom").addEventListener("click", () => zoomTo(null));
setUpNewPanel(state, changed, showProblem);
for (const listen of [onThemeChange, (redraw) => addEventListener("resize", redraw)]) listen(() => grid.redraw());
setUpViews(state, open, (key) => {
  view = key;
  remember();
});
const named = applyAddress(state, location);
(named ? open(named) : changed()).then(async () => {
  if (!named) await loadViews();
  showViews(view, state.project);
  await offerProjects();
  controls();
  await offerNames();
});
