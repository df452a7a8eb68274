// The page of one job: one stream of its overview, of which each part is shown by a module of its own.
import { $, fill, link } from "./dom.js";
import { jobPath, request } from "./api.js";
import { Live } from "./live.js";
import { showHead, titled } from "./job_head.js";
import { Curves } from "./curves.js";
import { showIslands } from "./islands.js";
import { showWorkers } from "./layout_grid.js";
import { addLines, downloadOf, filters, goToLine, takeFilters } from "./logs.js";
import { setUpTabs } from "./tabs.js";
import { addEvents, showAccounts, showIncidents } from "./history.js";
import { goToStep, showCheckpoints } from "./checkpoints.js";
import { showProfiles } from "./profiles.js";
import { showPreview } from "./data_preview.js";
import { showLineage, showMedia } from "./media.js";
import { showFiles } from "./files.js";
import { ENDED } from "./states.js";
import { showSpec } from "./spec.js";
import { showDescription, whenDescribed } from "./description.js";
import { showActions } from "./actions.js";
import { System } from "./system.js";
import { append } from "./curve_data.js";
import { follow, throttled } from "./reading.js";

const id = decodeURIComponent(location.pathname.split("/")[2]);
const stream = `${jobPath(id)}/overview?logs=true`;
const MAX_POINTS = 4000,
  RETRY_MS = 2000,
  ISLANDS_MS = 5000,
  POLL_MS = 10000,
  HIDDEN_MS = 30000;
const shown = { job: null, series: null, samples: null, incidents: [], events: [], checkpoints: [], clusters: [] };
const curves = new Curves(id, shown);
const system = new System(id, shown);
// Sections of other modules, by the name of their tab (a panel of job.html with this data-tab): called once, when its tab is opened first.
let hasPreview = false; // read again until rank 0 has described the data
const showData = async (id) => {
  $("no-data").hidden = hasPreview ||= await showPreview(id);
};
const SECTIONS = {
  system: () => system.start(),
  data: () => followed(showData),
  media: () => followed(showMedia),
  files: () => followed(showFiles),
};
const mounted = new Set();
// The job changes at each step, and a round closes now and then.
const islandsSoon = throttled(() => showIslands(shown.job), ISLANDS_MS);
window.shoalCurves = curves; // for people with a console, and for tests

const live = new Live({
  job(job) {
    shown.job = job;
    $("page").hidden = false;
    showHead(job, shown);
    showAccounts(job.status.goodput);
    showActions(shown);
    showDescription(job);
    showSpec(job);
    if (job.spec.islands) islandsSoon();
    mountOpen();
    curves.draw();
  },
  series(part) {
    shown.series = append(shown.series, part, "step");
    if (shown.series.step.length > MAX_POINTS) live.open(stream); // from the beginning again: the service sends fewer points
    curves.draw();
  },
  samples(part) {
    shown.samples = append(shown.samples, part, "at");
    curves.draw();
  },
  incidents(incidents) {
    shown.incidents = incidents;
    showIncidents(incidents);
    curves.draw();
  },
  workers(workers) {
    showWorkers(workers, shown.job);
  },
  events(events) {
    shown.events = addEvents(shown.events, events);
    if (events.some((one) => one.type.startsWith("profile."))) showProfiles(id).catch(() => {});
    curves.draw();
  },
  checkpoints(checkpoints) {
    shown.checkpoints = checkpoints;
    showCheckpoints(shown);
    if (shown.job) showActions(shown);
  },
  logs: addLines,
});

// Nothing tells the server of new media and files: the page reads again while it is looked at, until the job has ended.
const followed = (show) => follow(() => show(id).then(() => ENDED.has(shown.job.status.state)), POLL_MS);

const panels = Object.fromEntries(
  [...document.querySelectorAll("[data-tab]")].map((panel) => [panel.dataset.tab, panel]),
);
const mountOpen = () => {
  for (const [name, mount] of Object.entries(SECTIONS))
    if (shown.job && !panels[name].hidden && !mounted.has(name)) {
      mounted.add(name);
      mount(panels[name], shown.job);
    }
};
downloadOf(id);
const openTab = setUpTabs($("tabs"), (name, more) => {
  mountOpen();
  if (name === "curves" || name === "overview") curves.draw(true);
  if (name === "checkpoints") goToStep(more.has("step") ? Number(more.get("step")) : null);
  if (name === "logs") {
    takeFilters(more);
    goToLine(Number(more.get("line")), (line) => openTab("logs", { ...filters(), line }));
  }
});
whenDescribed((job) => live.handlers.job(job));
$("compare").href = `/compare?jobs=${encodeURIComponent(id)}`;
request("/v1/clusters").then(
  ({ items }) => {
    shown.clusters = items;
    if (shown.job) {
      showHead(shown.job, shown);
      showActions(shown);
    }
  },
  () => {},
);
function begin() {
  request(jobPath(id)).then(
    (job) => {
      $("missing").hidden = true;
      titled(job);
      live.open(stream);
      showProfiles(id).catch(() => {});
      showLineage(id).catch(() => {});
    },
    (error) => {
      $("missing").hidden = false;
      fill("missing", [error.status === 404 ? `There is no job ${id}. ` : `${error.message}. `, link("All jobs", "/")]);
      $("live").textContent = error.status === 404 ? "no job" : "disconnected";
      if (error.status !== 404) setTimeout(begin, RETRY_MS);
    },
  );
}
begin();

// A page that nobody looks at has no stream, but its title is read: it says the state among other tabs.
setInterval(() => {
  if (document.hidden && live.url) request(jobPath(id)).then(titled, () => {});
}, HIDDEN_MS);
