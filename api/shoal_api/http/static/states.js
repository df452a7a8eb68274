// States of a job: their colour, and the badge that shows one.
import { element } from "./dom.js";

export const COLOURS = {
  RUNNING: "run",
  SUCCEEDED: "done",
  FAILED: "bad",
  CANCELLED: "dim",
  QUEUED: "queue",
  STARTING: "busy",
  RESIZING: "busy",
  RECOVERING: "warn",
  WAITING: "warn",
  PAUSING: "queue",
  PAUSED: "queue",
  CANCELLING: "dim",
};
export const ENDED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
export const badge = (state, position) =>
  element("span", position ? `${state} #${position}` : state, { class: `badge ${COLOURS[state] || "busy"}` });
