// Workers over jobs and time: a lane for each job, as high as its workers, in the colour of its state; and the decisions.
import { $, element, fill, link, row, said, svg } from "./dom.js";
import { jobPage } from "./api.js";
import { brief, clock, moment, plural, whole } from "./format.js";
import { badge, COLOURS } from "./states.js";

const WIDTH = 1000, HEIGHT = 30;
const LOOKS = ["run", "warn", "queue", "done", "bad", "dim", "busy"];

export function showTimeline(found) {
  const most = Math.max(1, ...found.jobs.flatMap((job) => job.workers));
  $("timeline-words").textContent = found.jobs.length ? `${plural(found.jobs.length, "job")}${found.num_left_out ? ", the newest ones" : ""}; the highest lane is ${plural(most, "worker")}.` : "No job had an attempt in this time.";
  $("span").textContent = `Workers, ${brief(found.since)} to ${clock(found.until)}`;
  const seen = [...new Set(found.jobs.flatMap((job) => job.states.filter((_, index) => job.workers[index])))];
  fill("states", seen.map((state) => element("li", [element("span", "", { class: `swatch lane-${look(state)}` }), state])));
  fill("timeline", found.jobs.map((job) => row([element("td", said(link(job.name, jobPage(job.id), { title: job.id })), { class: "title" }), job.project, element("td", badge(job.state), { class: "title" }), element("td", lane(job, found, most), { class: "text" })], { class: "row", "data-id": job.id })));
  $("no-decisions").hidden = found.decisions.length > 0;
  fill("decisions", found.decisions.map((one) => row([element("span", brief(one.at), { title: moment(one.at) }), element("td", said(link(one.name, jobPage(one.job))), { class: "title" }), `${whole(one.before)} → ${whole(one.after)}`,
    one.to ? said(link(one.to_name, jobPage(one.to))) : "–", element("td", one.reason || one.words, { class: "text" })])));
}

const look = (state) => LOOKS.includes(COLOURS[state]) ? COLOURS[state] : "dim";

function lane(job, { since, until }, most) {
  const at = (time) => (time - since) / (until - since) * WIDTH;
  const parts = job.at.flatMap((time, index) => {
    const end = job.at[index + 1] ?? until, height = job.workers[index] / most * HEIGHT;
    return height ? [svg("rect", { x: at(time), y: HEIGHT - height, width: Math.max(0.5, at(end) - at(time)), height, class: `lane-${look(job.states[index])}` }, [svg("title", {}, [`${plural(job.workers[index], "worker")} (granted ${job.granted[index]}), ${job.states[index]}, ${moment(time)} to ${clock(end)}`])])] : [];
  });
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "lane", role: "img", "aria-label": `${job.name}: ${job.workers.join(", ")} workers, one after the other` }, parts);
}
