// The page of all jobs. Its address holds search, filters, order and page, so that a view can be shared.
import { $, bar, fillEach, fillFacts, onSubmit, showText } from "./dom.js";
import { Live } from "./live.js";
import { moment, percent, plural, seconds, whole } from "./format.js";
import { free, showNodes } from "./nodes.js";
import { COLOURS } from "./states.js";
import { showExports, showHeads, showJobs } from "./fleet_table.js";
import { setUpSubmission } from "./submit.js";
import { chosenIds, setUpChosen, showChosen } from "./chosen_jobs.js";
import { setUpColumns } from "./job_columns.js";
import { checked, NOTHING, query } from "./job_query.js";
import { loadViews, offerViews, savedView, setUpSaving, showProblem } from "./views.js";
import { KEPT } from "./api.js";

const LIMIT = 25,
  PAUSE_MS = 300;
const TEXTS = ["search", "state", "project", "label", "where"];
const view = { ...NOTHING, ...Object.fromEntries(new URLSearchParams(location.search)) };
let turn = 0,
  typing = null,
  applied = view; // the view that the stream and the table have
const live = new Live({ fleet: show });

// A condition that the service refuses leaves the table as it is, and the page says where the mistake is.
// What was typed is taken with any change, also before the pause after it is over.
async function change(changes) {
  const typed = typing === null ? {} : Object.fromEntries(TEXTS.map((name) => [name, $(name).value.trim()]));
  clearTimeout(typing);
  typing = null;
  Object.assign(view, { offset: "0" }, typed, changes);
  const mine = ++turn,
    kept = new URLSearchParams(
      Object.entries(view).filter(([name, value]) => value && !(name === "offset" && value === "0")),
    );
  history.replaceState(null, "", `/?${kept}`);
  for (const name of TEXTS) if (document.activeElement !== $(name)) $(name).value = view[name];
  $("archived").checked = view.archived === "true";
  const num = ["project", "label", "cluster", "archived"].filter((name) => view[name]).length;
  $("more").firstChild.textContent = num ? `More (${num})` : "More";
  let problem = "";
  try {
    await checked(view);
  } catch (error) {
    problem = error.message;
  }
  if (mine !== turn) return;
  showProblem(problem);
  if (problem) return;
  live.close();
  applied = { ...view };
  showExports(applied, chosenIds());
  showHeads(view, change);
  const { order, descending, offset, cluster } = view;
  live.open(
    `/v1/overview?${query(view, { order, descending, offset, limit: LIMIT, ...(cluster ? { cluster } : {}) })}`,
  );
}

function show(fleet) {
  showJobs(fleet, applied);
  showChosen(fleet);
  showNodes(fleet.nodes, fleet.clusters);
  showFilter(fleet.clusters, view.cluster);
  showDay(fleet.goodput);
  const offset = Number(applied.offset);
  $("range").textContent = fleet.total
    ? `${offset + 1} to ${offset + fleet.items.length} of ${whole(fleet.total)}`
    : "";
  $("before").disabled = offset === 0;
  $("after").disabled = offset + fleet.items.length >= fleet.total;
  const now = fleet.goodput_now;
  const productive = fleet.goodput.reduce((sum, bin) => sum + bin.productive, 0),
    total = fleet.goodput.reduce((sum, bin) => sum + bin.total, 0);
  fillFacts("totals", [
    ...Object.entries(fleet.num_by_state).map(([state, count]) => [state, whole(count)]),
    ["Goodput of active jobs", now ? percent(now.ratio) : "–"],
    ["Goodput, last 24 h", total ? percent(productive / total) : "–"],
    ["Worker time requested (24 h)", seconds(total)],
  ]);
  showText("exposure", fleet.exposure);
  const alive = fleet.nodes.filter((node) => node.alive);
  const away = fleet.clusters.filter((one) => !one.connected).map((one) => one.name),
    several = fleet.clusters.length > 1;
  $("cluster").textContent = fleet.connected
    ? `${several ? `${plural(fleet.clusters.length, "cluster")}${away.length ? ` (${away.join(", ")} away)` : ""}, ` : ""}${plural(alive.length, "node")}, ${plural(
        alive.reduce((sum, node) => sum + node.num_workers, 0),
        "worker",
      )}${fleet.clusters.length ? `, ${free(fleet.clusters.filter((one) => one.connected))}` : ""}`
    : "cluster not connected";
}

// The choice of a cluster is shown once there are several.
function showFilter(clusters, chosen) {
  const names = ["", ...clusters.map((one) => one.name)],
    select = $("cluster-filter");
  $("of-cluster").hidden = clusters.length < 2 && !chosen;
  if (chosen && !names.includes(chosen)) names.push(chosen);
  if (select.dataset.names !== names.join())
    select.replaceChildren(...names.map((name) => new Option(name || "all", name)));
  select.dataset.names = names.join();
  select.value = chosen;
}

// The goodput of the cluster over the last day, a column for each ten minutes: the coloured part was productive.
function showDay(bins) {
  const last = bins.length ? bins[bins.length - 1].at : 0;
  fillEach("goodput", bins, (bin) => {
    const share = bin.total ? bin.productive / bin.total : 0;
    return bar(
      `${moment(bin.at)}: ${percent(share)} of ${seconds(bin.total)}`,
      143 - (last - bin.at) / 600,
      10 - 10 * share,
      1.02,
      10 * share,
      { class: "productive" },
    );
  });
}

// The views of the table.
function setUpViews() {
  $("views").addEventListener("change", () => {
    const saved = savedView($("views").value);
    $("drop-view").disabled = !saved;
    change({ ...NOTHING, ...(saved ? { ...saved.view, archived: saved.view.archived ? "true" : "" } : {}) });
  });
  setUpSaving({
    title: "Save this view",
    words: "Condition, order, columns and filters are kept under this name, for all who see the project.",
    usual: () => view.project,
    document: (before) => ({
      ...Object.fromEntries(KEPT.map((key) => [key, view[key]])),
      archived: view.archived === "true",
      workspace: before?.workspace ?? null,
    }),
    shown: offerViews,
  });
  loadViews().then(() => offerViews(""));
}

$("state").append(...Object.keys(COLOURS).map((state) => new Option(state, state)));
for (const name of TEXTS) {
  $(name).value = view[name];
  $(name).addEventListener(name === "state" ? "change" : "input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => change({}), name === "where" ? PAUSE_MS : 0);
  });
}
$("archived").addEventListener("change", () => change({ archived: $("archived").checked ? "true" : "" }));
$("cluster-filter").addEventListener("change", () => change({ cluster: $("cluster-filter").value }));
onSubmit("filters", () => change({ where: $("where").value.trim() }));
$("before").addEventListener("click", () => change({ offset: String(Math.max(0, Number(view.offset) - LIMIT)) }));
$("after").addEventListener("click", () => change({ offset: String(Number(view.offset) + LIMIT) }));
setUpSubmission();
setUpChosen(view, () => showExports(applied, chosenIds()));
setUpColumns(view, change);
setUpViews();
change({ offset: view.offset });
