// The page of all jobs. Its address holds search, filters, order and page, so that a view can be shared.
import { $, facts } from "./dom.js";
import { Live } from "./live.js";
import { percent, plural, seconds, whole } from "./format.js";
import { COLOURS } from "./states.js";
import { showJobs, showHeads } from "./fleet_table.js";
import { showNodes } from "./nodes.js";
import { showFilter } from "./clusters.js";
import { showDay } from "./day.js";
import { setUpSubmission } from "./submit.js";

const LIMIT = 25;
const ACTIVE = ["QUEUED", "STARTING", "RUNNING", "RECOVERING", "RESIZING", "WAITING", "PAUSING"];
const view = Object.assign({ search: "", state: "", project: "", label: "", cluster: "", order: "created", descending: "true", offset: "0" },
  Object.fromEntries(new URLSearchParams(location.search)));
const live = new Live({ fleet: show });

if (/^#job-\w+$/.test(location.hash)) location.replace(`/jobs/${location.hash.slice(1)}`);  // addresses of earlier releases

function query() {
  const asked = new URLSearchParams({ order: view.order, descending: view.descending, offset: view.offset, limit: LIMIT });
  for (const name of ["search", "project", "label", "cluster"]) if (view[name]) asked.set(name, view[name]);
  for (const state of view.state === "active" ? ACTIVE : view.state ? [view.state] : []) asked.append("state", state);
  return asked;
}

function change(changes) {
  Object.assign(view, { offset: "0" }, changes);
  const kept = new URLSearchParams(Object.entries(view).filter(([name, value]) => value && !(name === "offset" && value === "0")));
  history.replaceState(null, "", `/?${kept}`);
  showHeads(view, change);
  live.open(`/v1/overview?${query()}`);
}

function show(fleet) {
  showJobs(fleet, view);
  showNodes(fleet.nodes, fleet.clusters);
  showFilter(fleet.clusters, view.cluster);
  showDay(fleet.goodput);
  const offset = Number(view.offset);
  $("range").textContent = fleet.total ? `${offset + 1} to ${offset + fleet.items.length} of ${whole(fleet.total)}` : "";
  $("before").disabled = offset === 0;
  $("after").disabled = offset + fleet.items.length >= fleet.total;
  const now = fleet.goodput_now;
  const productive = fleet.goodput.reduce((sum, bin) => sum + bin.productive, 0), total = fleet.goodput.reduce((sum, bin) => sum + bin.total, 0);
  $("totals").replaceChildren(...facts([
    ...Object.entries(fleet.num_by_state).map(([state, count]) => [state, whole(count)]),
    ["Goodput of active jobs", now ? percent(now.ratio) : "–"], ["Goodput of the last day", total ? percent(productive / total) : "–"],
    ["Requested, last day", seconds(total)]]));
  $("exposure").textContent = fleet.exposure;
  $("exposure").hidden = !fleet.exposure;
  const alive = fleet.nodes.filter((node) => node.alive);
  const away = fleet.clusters.filter((one) => !one.connected).map((one) => one.name), several = fleet.clusters.length > 1;
  $("cluster").textContent = fleet.connected ? `${several ? `${plural(fleet.clusters.length, "cluster")}${away.length ? ` (${away.join(", ")} away)` : ""}, ` : ""}${plural(alive.length, "node")}, ${plural(alive.reduce((sum, node) => sum + node.num_workers, 0), "worker")}` : "cluster not connected";
}

$("state").append(...Object.keys(COLOURS).map((state) => new Option(state, state)));
for (const name of ["search", "state", "project", "label"]) {
  $(name).value = view[name];
  $(name).addEventListener(name === "state" ? "change" : "input", () => change({ [name]: $(name).value.trim() }));
}
$("cluster-filter").addEventListener("change", () => change({ cluster: $("cluster-filter").value }));
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("before").addEventListener("click", () => change({ offset: String(Math.max(0, Number(view.offset) - LIMIT)) }));
$("after").addEventListener("click", () => change({ offset: String(Number(view.offset) + LIMIT) }));
addEventListener("keydown", (event) => { if (event.key === "/" && !/INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) { event.preventDefault(); $("search").focus(); } });
setUpSubmission();
change({ offset: view.offset });
