// The page of a sweep: its rules, curves, best so far, what matters, parallel axes and the table. It shows the jobs with any
// other label too, without what only a sweep has.
import { $, button, element, fillEach, fillFacts, link, onSubmit, rows, said } from "./dom.js";
import { jobPage, post, request, sweepPath, whoami } from "./api.js";
import { ask } from "./dialog.js";
import { Live } from "./live.js";
import { compare, number, numeric, percent, plural, steps, whole } from "./format.js";
import { badge, ENDED } from "./states.js";
import { onThemeChange } from "./looks.js";
import { drawAxes } from "./sweep_axes.js";
import { drawBest, drawCurves } from "./sweep_curves.js";
import { followSweeps } from "./sweep_list.js";
import { setUpStart } from "./sweep_start.js";
import { throttled } from "./reading.js";

const RESULTS = [
  ["Loss", "loss"],
  ["Validation loss", "val_loss"],
  ["Tokens/s", "tokens_per_s"],
  ["Goodput", "goodput"],
  ["Incidents", "incidents"],
];
const READ_MS = 3000;
const asked = new URLSearchParams(location.search),
  label = asked.get("label") || "";
const sweepName = /^sweep=(.+)$/.exec(label)?.[1] ?? null;
let items = [],
  order = "Best first",
  up = true,
  sweep = null,
  curves = null,
  may = new Set();
$("label").value = label;
onSubmit("pick", () => {
  location.search = `?label=${encodeURIComponent($("label").value.trim())}`;
});
onThemeChange(draw);
for (const name of ["over", "log"]) $(name).addEventListener("input", draw);
$("most").addEventListener("input", draw);
$("measure").addEventListener("input", () => readSweep());
$("stop").addEventListener("click", () =>
  ask({
    title: `Stop the sweep ${sweep.name}`,
    confirm: "Stop sweep",
    words: () =>
      `${plural(running().length, "job")} of ${whole(sweep.num_jobs)} end. This cannot be undone; their checkpoints are kept.`,
    send: () => post(`${sweepPath(sweep)}/cancel`).then(readSweep),
  }),
);
const soon = throttled(readSweep, READ_MS);
setUpStart();
whoami().then((me) => {
  may = new Set(me.permissions);
  $("new").hidden = !may.has("jobs:submit");
  showRules();
});

const live = new Live({
  fleet(fleet) {
    items = fleet.items;
    $("words").textContent = items.length
      ? `${plural(fleet.total, "job")} with ${label}${fleet.total > items.length ? `; the newest ${items.length} are shown` : ""}`
      : `No job has the label ${label}.`;
    $("axes").hidden = items.length < 2;
    $("list").hidden = !items.length;
    show();
    soon();
  },
});
const ofProject = asked.get("project") ? `&project=${encodeURIComponent(asked.get("project"))}` : "";
if (label) live.open(`/v1/overview?limit=200&label=${encodeURIComponent(label)}${ofProject}`);
else followSweeps();

// Read again when a job of the sweep has changed, but not more often than every three seconds.
async function readSweep() {
  if (!sweepName) return;
  const found = async (more) => (await request(`/v1/sweeps?name=${encodeURIComponent(sweepName)}${more}`)).items[0],
    project = sweep?.project ?? asked.get("project") ?? (await found(""))?.project;
  if (!project) return;
  const path = sweepPath({ project, name: sweepName });
  [sweep, curves] = await Promise.all([
    found(`&project=${encodeURIComponent(project)}`),
    request(`${path}/curves?measure=${$("measure").value}`),
  ]);
  rules ??= await request(path);
  showRules();
  draw();
}

let rules = null;
const running = () => items.filter((job) => !ENDED.has(job.state));
const pruned = () => items.filter((job) => job.reason === "pruned");

function showRules() {
  $("sweep").hidden = !sweep;
  if (!sweep) return;
  const { limit, prune, warmup_steps: warmup, reduction } = rules;
  $("sweep-title").textContent = `${sweep.name} in ${sweep.project}`;
  fillFacts("rules", [
    ...Object.entries(sweep.num_by_state).map(([state, count]) => [state, whole(count)]),
    ["Pruned", whole(pruned().length)],
    ["Max concurrent", limit === null ? "no limit" : whole(limit)],
    [
      "Pruning",
      prune === null
        ? "off"
        : prune === "median"
          ? `median, from step ${warmup}`
          : `best 1/${reduction} at steps ${warmup}, ${warmup * reduction}, …`,
    ],
  ]);
  $("stop").hidden = !running().length || !may.has("jobs:change");
}

// The labels that differ: the parameters of the sweep.
const labelsOf = (jobs) =>
  [...new Set(jobs.flatMap((job) => Object.keys(job.labels)))]
    .sort()
    .filter((name) => new Set(jobs.map((job) => job.labels[name])).size > 1);
const lossOf = (job) => job.val_loss ?? job.loss;
const bestFirst = () => [...items].sort((a, b) => compare(lossOf(a), lossOf(b)));

function show() {
  const names = labelsOf(items),
    ranks = new Map(bestFirst().map((job, rank) => [job.id, rank]));
  const columns = [
    ["Job", (job) => job.name],
    ["State", (job) => job.state],
    ...names.map((name) => [name, (job) => numeric(job.labels[name])]),
    ["Step", (job) => job.step],
    ...RESULTS.map(([title, key]) => [title, (job) => job[key]]),
    ["Why", (job) => job.message],
  ];
  const value = columns.find(([title]) => title === order)?.[1] ?? ((job) => ranks.get(job.id));
  const sorted = [...items].sort((a, b) => compare(value(a), value(b)) * (up ? 1 : -1));
  fillEach("heads", columns, ([title]) =>
    element(
      "th",
      button(title + (title === order ? (up ? " ▴" : " ▾") : ""), () => {
        up = title === order ? !up : true;
        order = title;
        show();
      }),
      { scope: "col", "aria-sort": title === order ? (up ? "ascending" : "descending") : "none" },
    ),
  );
  rows("jobs", sorted, (job) => [
    element("td.title", said(link(job.name, jobPage(job.id), { title: job.id }))),
    element("td.title", [
      badge(job.state),
      job.reason === "pruned" ? " pruned" : ranks.get(job.id) === 0 && typeof lossOf(job) === "number" ? " best" : "",
    ]),
    ...names.map((name) => job.labels[name] ?? "–"),
    steps(job),
    number(job.loss),
    number(job.val_loss),
    number(job.tokens_per_s),
    percent(job.goodput),
    job.incidents,
    element("td.text", job.state === "RUNNING" ? "" : job.message),
    { class: "row" },
  ]);
  draw();
}

function draw() {
  const best = bestFirst();
  if (items.length > 1) {
    const results = RESULTS.filter(([, key]) => items.some((job) => typeof job[key] === "number"));
    drawAxes(
      best,
      [
        ...labelsOf(items).map((name) => [name, (job) => numeric(job.labels[name])]),
        ...results.map(([title, key]) => [title, (job) => job[key]]),
      ],
      Number($("most").value) || items.length,
    );
  }
  $("curves-card").hidden = !curves;
  if (!curves) return;
  drawCurves(curves, best);
  drawBest(curves, best);
}
