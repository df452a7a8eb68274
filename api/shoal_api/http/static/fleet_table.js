// The table of jobs: its heads sort, its rows link, its boxes choose jobs. It has the usual columns, or those of the view.
import { $, button, element, fill, link, row, small } from "./dom.js";
import { box, pageBox } from "./chosen_jobs.js";
import { shownValue } from "./job_columns.js";
import { bare, split } from "./job_query.js";
import { jobPage } from "./api.js";
import { brief, grant, moment, number, percent, progressOf, seconds, steps, whole } from "./format.js";
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
  $("heads").replaceChildren(
    pageHead(),
    ...heads.map(([name, order, ...second]) => {
      if (!order) return element("th", name, { scope: "col" });
      const sorts = [[name, order], ...(second.length ? [second] : [])];
      const current = sorts.map(([, by]) => sortedBy(by, view)).find(Boolean) ?? "none";
      const buttons = sorts.flatMap(([title, by], index) => [index ? " / " : "", deed(title, by, view, change)]);
      return element("th", buttons, { scope: "col", "aria-sort": current });
    }),
  );
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
  fill(
    "jobs",
    items.map((job) => jobRow(job, clusters.length > 1, split(view.columns).map(bare))),
  );
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

function jobRow(job, several, columns) {
  const share = progressOf(job);
  const progress =
    share === null ? [] : [element("progress", null, { max: 1, value: share, "aria-label": "Progress" })];
  const labels = Object.entries(job.labels)
    .map(([key, value]) => `${key}=${value}`)
    .join(" ");
  const name = fitted([
    link(job.name, jobPage(job.id), { title: `${job.id} ${labels}` }),
    " ",
    ...(labels ? [small(labels)] : []),
  ]);
  const owner = fitted([job.user, " ", small(job.project)]);
  const where = several && job.cluster ? ` in ${job.cluster}` : "";
  const state = fitted([badge(job.state, job.queue_position), small(`${where} ${waits(job)}`)]);
  const first = [
    element("td", box(job), { class: "pick" }),
    element("td", name, { class: "title" }),
    element("td", state, { class: "title", title: job.message }),
  ];
  if (columns.length)
    return row(
      [...first, ...columns.map((name) => element("td", shownValue(name, job.values[name]), { class: "value" }))],
      { class: "row", "data-id": job.id },
    );
  return row(
    [
      ...first,
      line([...progress, " ", element("span", steps(job), { class: "small" })]),
      seconds(job.eta_s),
      line([number(job.loss), " ", spark(job.losses, "Loss")]),
      line([grant(job), " ", spark(job.world_sizes, "World size", { steps: true })]),
      number(job.tokens_per_s),
      percent(job.goodput),
      whole(job.incidents),
      element("td", owner, { title: `${job.user} ${job.project}` }),
      line([
        element("span", brief(job.created_at), { title: moment(job.created_at) }),
        ...(job.priority ? [small(` priority ${job.priority}`)] : []),
      ]),
    ],
    { class: "row", "data-id": job.id },
  );
}

const pageHead = () => element("th", element("label", pageBox, { class: "hit" }), { scope: "col", class: "pick" });
const line = (parts) => element("div", parts, { class: "line" });
// A line whose text is cut where the table would be wider than the window.
const fitted = (parts) => element("div", parts, { class: "line fitted" });

// Why a job waits; the message of a job that trains says nothing that the row does not.
const waits = (job) =>
  ["QUEUED", "WAITING", "STARTING", "FAILED", "RECOVERING", "PAUSED"].includes(job.state) ? shorten(job.message) : "";
const shorten = (text) => (text.length > 110 ? `${text.slice(0, 108)}…` : text);
