// The queue in the order in which its jobs would start, and the running jobs that get no more workers.
import { $, element, link, rows, said } from "./dom.js";
import { jobPage } from "./api.js";
import { moment, seconds, whole } from "./format.js";
import { holders } from "./holders.js";

const title = (job) => element("td.title", said(link(job.name, jobPage(job.job_id))));

export function showQueue(queue) {
  const now = Date.now() / 1000;
  rows("queue", queue.items, (job) => [
    whole(job.place?.position),
    title(job),
    said(`${job.project}, ${job.user}`),
    whole(job.priority),
    element("span", seconds(Math.max(0, now - job.submitted_at)), { title: moment(job.submitted_at) }),
    starts(job.place, now),
    element("td.text", job.place?.reason ?? "The scheduler has not considered it yet."),
    element("td.text", job.place?.holders.length ? holders(job.place.holders) : "–"),
    { "data-id": job.job_id },
  ]);
  $("of-held").hidden = !queue.held_back.length;
  rows("held", queue.held_back, (job) => [
    title(job),
    job.project,
    `${whole(job.workers)} of ${whole(job.answer.max_workers)}`,
    element("td.text", job.answer.reason),
  ]);
}

function starts(place, now) {
  if (!place || place.expected_at === null) return "not known";
  const left = place.expected_at - now;
  return element("span", left >= 1 ? `in ${seconds(left)}` : "now", { title: moment(place.expected_at) });
}
