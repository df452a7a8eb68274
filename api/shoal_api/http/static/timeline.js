// Workers over jobs and time: a lane for each job, as high as its workers, in the colour of its state; and each change of a
// job's workers, with the jobs that gave or got them.
import { $, element, fill, link, rows, said, svg } from "./dom.js";
import { jobPage } from "./api.js";
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
  fill(
    "states",
    looks.map((name) =>
      element("li", [
        element("span", "", { class: `swatch lane-${name}` }),
        seen.filter((state) => look(state) === name).join(", "),
      ]),
    ),
  );
  rows(
    "timeline",
    found.jobs,
    (job) => [
      element("td", said(link(job.name, jobPage(job.id), { title: job.id })), { class: "title" }),
      job.project,
      element("td", badge(job.state), { class: "title" }),
      element("td", lane(job, found, most), { class: "text" }),
    ],
    (job) => ({ class: "row", "data-id": job.id }),
  );
  changes = found.decisions;
  showChanges();
}

function showChanges() {
  const shown = is_whole ? changes : changes.slice(0, FEW);
  $("no-decisions").hidden = changes.length > 0;
  $("all-decisions").hidden = shown.length === changes.length;
  $("all-decisions").textContent = `Show all ${whole(changes.length)}`;
  rows(
    "decisions",
    shown,
    (one) => [
      element("span", brief(one.at), { title: moment(one.at) }),
      element("td", said(link(one.name, jobPage(one.job))), { class: "title" }),
      WHAT[one.kind],
      `${whole(one.before)} → ${whole(one.after)}`,
      element("td", partners(one), { class: "text" }),
      element("td", one.reason || one.words, { class: "text" }),
    ],
    (one) => ({ "data-kind": one.kind }),
  );
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
    ...(one.others.length && one.free ? ["; "] : []),
    ...(one.free ? [free] : []),
    ...(traced.length ? [", ", ...named(traced, gets ? "freed by " : "given to ")] : []),
  ];
}

const look = (state) => (LOOKS.includes(COLOURS[state]) ? COLOURS[state] : "dim");

function lane(job, { since, until }, most) {
  const at = (time) => ((time - since) / (until - since)) * WIDTH;
  const parts = job.at.flatMap((time, index) => {
    const end = job.at[index + 1] ?? until,
      height = (job.workers[index] / most) * HEIGHT;
    return height
      ? [
          svg(
            "rect",
            {
              x: at(time),
              y: HEIGHT - height,
              width: Math.max(0.5, at(end) - at(time)),
              height,
              class: `lane-${look(job.states[index])}`,
            },
            [
              svg("title", {}, [
                `${plural(job.workers[index], "worker")} (granted ${job.granted[index]}), ${job.states[index]}, ${moment(time)} to ${clock(end)}`,
              ]),
            ],
          ),
        ]
      : [];
  });
  return svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      class: "lane",
      role: "img",
      "aria-label": `${job.name}: ${job.workers.join(", ")} workers, one after the other`,
    },
    parts,
  );
}
