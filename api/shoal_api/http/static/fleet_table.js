// The table of jobs: its heads sort, its rows link, its boxes choose jobs. It has the usual columns, or those of the view.
import { $, button, element, fill, link, progress, rows, small } from "./dom.js";
import { box, pageBox } from "./chosen_jobs.js";
import { shownValue } from "./job_columns.js";
import { bare, query, split } from "./job_query.js";
import { jobPage } from "./api.js";
import { brief, grant, moment, number, pairs, percent, progressOf, seconds, steps, whole } from "./format.js";
import { badge } from "./states.js";
import { spark } from "./spark.js";

const UPWARDS = new Set(["name", "state", "project", "loss", "eta_s"]), // smallest first
  NAMED = { name: "Job", state: "State" };
const HEADS = [
  ["Job", "name"],
  ["State", "state"],
  ["Progress", "step"],
  ["Remaining", "eta_s"],
  ["Loss", "loss"],
  ["Workers", ""],
  ["Tokens/s", "tokens_per_s"],
  ["Goodput", "goodput"],
  ["Incidents", "incidents"],
  ["User", "user", "Project", "project"],
  ["Submitted", "created", "Priority", "priority"],
];

export function showHeads(view, change) {
  const chosen = ["name", "state", ...split(view.columns)].map((name) => [NAMED[name] ?? bare(name), name]);
  const heads = view.columns ? chosen : HEADS;
  fill("heads", [
    pageHead(),
    ...heads.map(([name, order, ...second]) => {
      if (!order) return element("th", name, { scope: "col" });
      const sorts = [[name, order], ...(second.length ? [second] : [])];
      const current = sorts.map(([, by]) => sortedBy(by, view)).find(Boolean) ?? "none";
      const buttons = sorts.flatMap(([title, by], index) => [index ? " / " : "", deed(title, by, view, change)]);
      return element("th", buttons, { scope: "col", "aria-sort": current });
    }),
  ]);
}

// A chosen column is sorted by its name, a usual one by an order of the list.
function sortedBy(by, view) {
  if (!view.columns)
    return view.order === by && !view.sort && (view.descending === "true" ? "descending" : "ascending");
  return view.sort.replace(/^-/, "") === by && (view.sort.startsWith("-") ? "descending" : "ascending");
}

function deed(name, by, view, change) {
  const now = sortedBy(by, view);
  const arrow = now ? { descending: " ▾", ascending: " ▴" }[now] : "";
  const press = () =>
    change(
      view.columns
        ? { sort: now === "ascending" ? `-${by}` : by }
        : { sort: "", order: by, descending: String(now ? now === "ascending" : !UPWARDS.has(by)) },
    );
  return button(name + arrow, press);
}

export function showJobs({ items, total, clusters }, view) {
  const focused = document.activeElement?.closest?.("tr")?.dataset.id,
    control = document.activeElement?.matches("input") ? "input" : "a";
  rows("jobs", items, (job) => cells(job, clusters.length > 1, split(view.columns).map(bare)));
  if (focused)
    $("jobs")
      .querySelector(`tr[data-id="${CSS.escape(focused)}"] ${control}`)
      ?.focus();
  $("none").hidden = total > 0;
  const filtered = view.search || view.state || view.project || view.label || view.cluster || view.where;
  $("none").textContent = filtered
    ? "No job matches."
    : "No job yet. Submit one here, or with: shoal submit job.yaml --follow";
}

function cells(job, several, columns) {
  const share = progressOf(job);
  const labels = pairs(job.labels);
  const name = fitted([
    link(job.name, jobPage(job.id), { title: `${job.id} ${labels}` }),
    " ",
    labels ? small(labels) : null,
  ]);
  const owner = fitted([job.user, " ", small(job.project)]);
  const where = several && job.cluster ? ` in ${job.cluster}` : "";
  const state = fitted([badge(job.state, job.queue_position), small(`${where} ${waits(job)}`)]);
  const first = [
    { class: "row", "data-id": job.id },
    element("td.pick", box(job)),
    element("td.title", name),
    element("td.title", state, { title: job.message }),
  ];
  if (columns.length)
    return [...first, ...columns.map((name) => element("td.value", shownValue(name, job.values[name])))];
  return [
    ...first,
    line([share === null ? null : progress(share, 1, "Progress"), " ", element("span.small", steps(job))]),
    seconds(job.eta_s),
    line([number(job.loss), " ", spark(job.losses, "Loss")]),
    line([grant(job), " ", spark(job.world_sizes, "World size", { steps: true })]),
    number(job.tokens_per_s),
    percent(job.goodput),
    whole(job.incidents),
    element("td", owner, { title: `${job.user} ${job.project}` }),
    line([
      element("span", brief(job.created_at), { title: moment(job.created_at) }),
      job.priority ? small(` priority ${job.priority}`) : null,
    ]),
  ];
}

const pageHead = () => element("th.pick", element("label.hit", pageBox), { scope: "col" });
const line = (parts) => element("div.line", parts);
// A line whose text is cut where the table would be wider than the window.
const fitted = (parts) => element("div.line.fitted", parts);

// Why a job waits; the message of a job that trains says nothing that the row does not.
const waits = (job) =>
  ["QUEUED", "WAITING", "STARTING", "FAILED", "RECOVERING", "PAUSED"].includes(job.state) ? shorten(job.message) : "";
const shorten = (text) => (text.length > 110 ? `${text.slice(0, 108)}…` : text);

// The links that export the table: the service makes the files, of the chosen jobs, or of all that match.
const MOST = 500; // jobs that an address names
const FORMATS = [
  ["csv", "CSV"],
  ["parquet", "Parquet"],
];

// `ids`: those of the chosen jobs. They are exported also if the filters do not show them any more.
export function showExports(view, ids) {
  const { sort, columns, order, descending, cluster } = view;
  const asked = ids.length
    ? query({ sort, columns }, { order, descending })
    : query(view, { order, descending, ...(cluster ? { cluster } : {}) });
  for (const id of ids) asked.append("job", id);
  const fits = ids.length <= MOST;
  for (const [format, name] of FORMATS) {
    const link = $(`export-${format}`);
    asked.set("format", format);
    if (fits) link.setAttribute("href", `/v1/job-export?${asked}`);
    else link.removeAttribute("href");
    link.setAttribute("aria-disabled", String(!fits));
    link.textContent = ids.length ? `Export ${ids.length} as ${name}` : `Export ${name}`;
  }
  $("export-words").textContent = fits
    ? ""
    : `A file has at most ${MOST} chosen jobs. Clear the selection to export all jobs that match.`;
}
