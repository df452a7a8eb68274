// The queue in the order in which its jobs would start, and the running jobs that get no more workers.
import { $, element, link, rows, said } from "./dom.js";
import { jobPage } from "./api.js";
import { moment, seconds, whole } from "./format.js";
import { holders } from "./holders.js";

const title = (job) => element("td", said(link(job.name, jobPage(job.job_id))), { class: "title" });

export function showQueue(queue) {
  const now = Date.now() / 1000;
  $("no-queue").hidden = queue.items.length > 0;
  rows(
    "queue",
    queue.items,
    (job) => [
      whole(job.place?.position),
      title(job),
      said(`${job.project}, ${job.user}`),
      whole(job.priority),
      element("span", seconds(Math.max(0, now - job.submitted_at)), { title: moment(job.submitted_at) }),
      starts(job.place, now),
      element("td", job.place?.reason ?? "The scheduler has not considered it yet.", { class: "text" }),
      element("td", job.place?.holders.length ? holders(job.place.holders) : "–", { class: "text" }),
    ],
    (job) => ({ "data-id": job.job_id }),
  );
  $("of-held").hidden = !queue.held_back.length;
  rows("held", queue.held_back, (job) => [
    title(job),
    job.project,
    `${whole(job.workers)} of ${whole(job.answer.max_workers)}`,
    element("td", job.answer.reason, { class: "text" }),
  ]);
}

function starts(place, now) {
  if (!place || place.expected_at === null) return "not known";
  const left = place.expected_at - now;
  return element("span", left >= 1 ? `in ${seconds(left)}` : "now", { title: moment(place.expected_at) });
}
