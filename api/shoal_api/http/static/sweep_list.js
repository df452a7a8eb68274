// The page of sweeps without a chosen one: a table of them, the newest first. sweeps.js calls it.
import { $, element, link, progress, rows, said, smallLine } from "./dom.js";
import { jobPage, request } from "./api.js";
import { brief, moment, number, plural, seconds, whole } from "./format.js";
import { badge, ENDED } from "./states.js";
import { sweepPage } from "./sweep_start.js";
import { follow } from "./reading.js";

const READ_MS = 10000;
let pages = 1;
$("more-sweeps").addEventListener("click", () => {
  pages += 1;
  showSweeps();
});

// It is read again while a sweep goes on.
export const followSweeps = () => follow(() => showSweeps().then((goesOn) => !goesOn), READ_MS);

async function showSweeps() {
  const found = [];
  let cursor = null;
  for (let number = 0; number < pages && (number === 0 || cursor); number += 1) {
    const page = await request(`/v1/sweeps${cursor ? `?cursor=${encodeURIComponent(cursor)}` : ""}`);
    found.push(...page.items);
    cursor = page.next_cursor;
  }
  $("sweeps-card").hidden = !found.length;
  $("more-sweeps").hidden = !cursor;
  rows("sweeps", found, cells);
  return found.some((one) => one.ended_at === null);
}

function cells(one) {
  const ended = Object.entries(one.num_by_state).reduce(
    (sum, [state, count]) => sum + (ENDED.has(state) ? count : 0),
    0,
  );
  const jobs = [
    element("div", [
      `${whole(ended)} of ${plural(one.num_jobs, "job")} `,
      progress(ended, one.num_jobs, `Jobs of ${one.name} that have ended`),
    ]),
    smallLine(
      Object.entries(one.num_by_state)
        .map(([state, count]) => `${whole(count)} ${state}`)
        .join(", "),
    ),
  ];
  const best = one.best
    ? [number(one.best.value), smallLine(one.best.measure === "val_loss" ? "validation loss" : "loss")]
    : "–";
  const took = one.ended_at === null ? "" : `took ${seconds(one.ended_at - one.created_at)}`;
  return [
    element("td.title", said(link(one.name, sweepPage(one)))),
    said(one.project),
    badge(stateOf(one.num_by_state)),
    element("td.text", jobs),
    element("div", best),
    one.best ? said(link(one.best.name, jobPage(one.best.job), { title: one.best.job })) : "–",
    element("div", [element("div", brief(one.created_at), { title: moment(one.created_at) }), smallLine(took)]),
    { class: "row", "data-sweep": one.name },
  ];
}

// The state of a sweep in one word. While jobs are left: RUNNING if one is in an attempt, else what most of them do; at the
// end SUCCEEDED if a job has succeeded, else what became of most. Pure.
export function stateOf(counts) {
  const left = Object.entries(counts).filter(([state]) => !ENDED.has(state)),
    most = (of) => [...of].sort((a, b) => b[1] - a[1])[0][0];
  if (!left.length) return counts.SUCCEEDED ? "SUCCEEDED" : most(Object.entries(counts));
  return left.every(([state]) => WAITS.has(state)) ? most(left) : "RUNNING";
}
const WAITS = new Set(["QUEUED", "PAUSED", "PAUSING", "CANCELLING"]);
