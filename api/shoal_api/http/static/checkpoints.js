// The durable checkpoints of a job, newest first.
import { $, element, fill, row } from "./dom.js";
import { bytes, moment, seconds, whole } from "./format.js";

const COLOURS = { committed: "done", damaged: "bad", failed: "bad", deleted: "dim" };

export function showCheckpoints(checkpoints) {
  $("unsaved").hidden = checkpoints.length > 0;
  fill("checkpoints", [...checkpoints].reverse().map((one) => row([whole(one.step), element("span", one.state, { class: COLOURS[one.state] }), moment(one.committed_at), bytes(one.bytes), seconds(one.seconds),
    seconds(one.stall_s), one.world_size || "–", element("code", one.url)], { title: one.message })));
}
