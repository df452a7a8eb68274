// Workers over jobs and time: a lane for each job, as high as its workers, in the colour of its state; and each change of a
// job's workers, with the jobs that gave or got them.
import { $, bar, element, fillEach, link, picture, rows, said } from "./dom.js";
import { jobPage, request } from "./api.js";
import { brief, clock, moment, plural, seconds, whole } from "./format.js";
import { badge, COLOURS } from "./states.js";

const WIDTH = 1000,
  HEIGHT = 30,
  FEW = innerWidth > 640 ? 50 : 8;
const LOOKS = ["run", "warn", "queue", "done", "bad", "dim", "busy"];
let changes = [],
  is_whole = false;
$("all-decisions").addEventListener("click", () => {
  is_whole = true;
  showChanges();
});

export function showTimeline(found) {
  const most = Math.max(1, ...found.jobs.flatMap((job) => job.workers));
  $("timeline-words").textContent = found.jobs.length
    ? `The last ${seconds(found.until - found.since)}: ${plural(found.jobs.length, "job")}${found.num_left_out ? ", the newest ones" : ""}; the highest lane is ${plural(most, "worker")}.`
    : `No job had an attempt in the last ${seconds(found.until - found.since)}.`;
  $("span").textContent = `Workers, ${brief(found.since)} to ${clock(found.until)}`;
  const seen = [...new Set(found.jobs.flatMap((job) => job.states.filter((_, index) => job.workers[index])))];
  const looks = [...new Set(seen.map(look))];
  fillEach("states", looks, (name) =>
    element("li", [
      element("span", "", { class: `swatch lane-${name}` }),
      seen.filter((state) => look(state) === name).join(", "),
    ]),
  );
  rows("timeline", found.jobs, (job) => [
    element("td.title", said(link(job.name, jobPage(job.id), { title: job.id }))),
    job.project,
    element("td.title", badge(job.state)),
    element("td.text", lane(job, found, most)),
    { class: "row", "data-id": job.id },
  ]);
  changes = found.decisions;
  showChanges();
}

function showChanges() {
  const shown = is_whole ? changes : changes.slice(0, FEW);
  $("all-decisions").hidden = shown.length === changes.length;
  $("all-decisions").textContent = `Show all ${whole(changes.length)}`;
  rows("decisions", shown, (one) => [
    element("span", brief(one.at), { title: moment(one.at) }),
    element("td.title", said(link(one.name, jobPage(one.job)))),
    WHAT[one.kind],
    `${whole(one.before)} → ${whole(one.after)}`,
    element("td.text", partners(one)),
    element("td.text", one.reason || one.words),
    { "data-kind": one.kind },
  ]);
}

const WHAT = {
  start: "started",
  grow: "grew",
  shrink: "shrank",
  preempt: "preempted",
  leave: "gave back",
  lost: "lost workers",
  recovered: "formed again",
};
const GETS = new Set(["start", "grow"]);

// "2 from a; 3 free workers, 2 freed by b", or "2 to a; freed 3, 2 given to b".
function partners(one) {
  const named = (flows, between) =>
    flows.flatMap((flow, index) => [
      index ? ", " : "",
      `${whole(flow.workers)} ${between}`,
      link(flow.name, jobPage(flow.job)),
    ]);
  if (one.kind === "lost" || one.kind === "recovered") return ["-"];
  const gets = GETS.has(one.kind),
    free = gets ? plural(one.free, "free worker") : `freed ${whole(one.free)}`;
  const traced = gets ? one.freed_by : one.taken_by;
  return [
    ...named(one.others, gets ? "from " : "to "),
    one.others.length && one.free ? "; " : null,
    one.free ? free : null,
    traced.length ? [", ", named(traced, gets ? "freed by " : "given to ")] : null,
  ];
}

const look = (state) => (LOOKS.includes(COLOURS[state]) ? COLOURS[state] : "dim");

function lane(job, { since, until }, most) {
  const at = (time) => ((time - since) / (until - since)) * WIDTH;
  const parts = job.at.map((time, index) => {
    const end = job.at[index + 1] ?? until,
      height = (job.workers[index] / most) * HEIGHT,
      words = `${plural(job.workers[index], "worker")} (granted ${job.granted[index]}), ${job.states[index]}, ${moment(time)} to ${clock(end)}`;
    return bar(words, at(time), HEIGHT - height, Math.max(0.5, at(end) - at(time)), height, {
      class: `lane-${look(job.states[index])}`,
    });
  });
  const shown = parts.filter((_, index) => job.workers[index]),
    label = `${job.name}: ${job.workers.join(", ")} workers, one after the other`;
  return picture(WIDTH, HEIGHT, label, shown, { class: "lane" });
}

// The time that the page shows: the range that was chosen, which its address keeps (?hours=6), or the smallest usual one that holds what
// happened lately.
const HOURS = [0.25, 1, 6, 24, 168, 720],
  DAY = HOURS.indexOf(24);
const LATELY = 20; // changes
const FIT_MS = 60000;
let fitted = null,
  fittedAt = 0;

export function setUpRange(read) {
  const asked = new URLSearchParams(location.search).get("hours");
  if ([...$("hours").options].some((one) => one.value === asked)) $("hours").value = asked;
  $("hours").addEventListener("change", () => {
    history.replaceState(null, "", $("hours").value ? `?hours=${$("hours").value}` : location.pathname);
    fitted = null;
    read();
  });
}

// Once a minute the range is fitted anew: narrow ranges are read before wide ones, which cost more.
export async function readTimeline() {
  const fixed = $("hours").value || (Date.now() - fittedAt < FIT_MS ? fitted : null);
  if (fixed) return timeline(fixed);
  const found = [];
  let chosen = null;
  while (chosen === null) {
    found.push(await timeline(HOURS[found.length]));
    chosen = fitting(
      found.map((one) => one.decisions.length),
      found.length === HOURS.length,
    );
  }
  fitted = HOURS[chosen];
  fittedAt = Date.now();
  return found[chosen];
}

// The smallest range that holds at least half of the newest changes; null: a wider one is to be read first. Half of them, so
// that a single change of last month does not make a line of the jobs of today. Without any change: a day. Pure.
// `counts`: the changes in each range, narrow ones first; `isAll`: there is no wider one.
export function fitting(counts, isAll) {
  const most = Math.min(LATELY, counts.at(-1));
  if (most < LATELY && !isAll) return null;
  return most ? counts.findIndex((count) => count >= most / 2) : DAY;
}

const timeline = (hours) => request(`/v1/timeline?hours=${hours}`);
