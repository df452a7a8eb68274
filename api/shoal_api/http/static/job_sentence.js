// The state of a job in one sentence: what it does, since when, and what comes next. Pure.
import { moment, number, percent, plural, seconds, whole } from "./format.js";

export function sentence(job) {
  const { status, spec } = job,
    took = job.started_at && job.ended_at ? ` in ${seconds(job.ended_at - job.started_at)}` : "";
  const to = status.total_steps ? ` of ${whole(status.total_steps)}` : "",
    done = status.step || status.total_steps ? `step ${whole(status.step)}${to}` : "";
  const workers = plural(status.workers, "worker"),
    eta = status.eta_s === null ? "" : `; about ${seconds(status.eta_s)} remain`;
  const at = done ? ` at ${done}` : "",
    after = status.step ? ` after ${done}` : done ? " before its first step" : "";
  switch (status.state) {
    case "QUEUED":
      return job.queue
        ? `Waits in the queue at position ${job.queue.position}${job.queue.expected_at === null ? "" : `, and is expected to start ${moment(job.queue.expected_at)}`}.`
        : "Waits in the queue.";
    case "STARTING":
      return `Starts ${plural(status.desired_workers, "worker")}${at}.`;
    case "RUNNING":
      return `Trains with ${workers}${at}${eta}.`;
    case "RECOVERING":
      return `Replaces lost workers${at}${eta}.`;
    case "RESIZING":
      return `Changes the number of workers or the layout${at}.`;
    case "WAITING":
      return `Waits for workers${at}: it has ${status.workers} of at least ${spec.elasticity.min_workers}.`;
    case "PAUSING":
      return `Saves a checkpoint${at}, then pauses.`;
    case "PAUSED":
      return `Paused${at}. Resume puts it back into the queue.`;
    case "CANCELLING":
      return `Ends${at}: it was cancelled.`;
    case "SUCCEEDED":
      return `Finished${after}${took}${status.loss === null ? "" : `, with loss ${number(status.loss)}`}${status.goodput?.total ? ` and ${percent(status.goodput.ratio)} goodput` : ""}.`;
    case "FAILED":
      return `Failed${after}${took}.`;
    case "CANCELLED":
      return `Cancelled${after}${took}.`;
    default:
      return `${status.state}${at}.`;
  }
}
