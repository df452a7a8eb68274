// The profiles of a job, newest first: where the time of a step went, and the files to download.
import { element, fillEach, link, rows, small } from "./dom.js";
import { jobPath, request } from "./api.js";
import { bytes, moment, percent, seconds, whole } from "./format.js";
import { key, stripe } from "./stripe.js";
import { latest } from "./reading.js";

export const PARTS = ["compute", "communication", "data", "optimizer", "snapshot", "checkpoint", "validation", "other"];
const COLOURS = { requested: "dim", done: "done", failed: "bad" };

// Read again when an event of a profile arrives; nothing is asked while nothing happens.
export const showProfiles = latest(
  (id) => request(`${jobPath(id)}/profiles`),
  ({ items }, id) => {
    fillEach("profile-key", items.some((one) => one.times.length) ? PARTS : [], (name) => key(name));
    rows("profiles", [...items].reverse(), (one) => [
      whole(one.number),
      element("span", one.state, { class: COLOURS[one.state] }),
      whole(one.rank),
      steps(one),
      one.times.length ? seconds(mean(one)) : "–",
      where(one),
      one.peak_bytes === null ? "–" : bytes(one.peak_bytes),
      one.times.length ? seconds(one.held_s) : "–",
      moment(one.requested_at),
      element("td.text", one.reason || one.note || ""),
      files(id, one),
      { "data-profile": one.number },
    ]);
  },
);

const spent = (one, name) => one.times.reduce((sum, times) => sum + (times.seconds[name] ?? 0), 0) / one.times.length;
const mean = (one) => PARTS.reduce((sum, name) => sum + spent(one, name), 0);
const steps = (one) =>
  one.times.length ? `${whole(one.times[0].step)} to ${whole(one.times.at(-1).step)}` : `${one.steps} requested`;

function where(one) {
  if (!one.times.length) return "–";
  const parts = PARTS.map((name) => [name, spent(one, name)]).filter(([, amount]) => amount > 0);
  const said = parts.map(([name, amount]) => `${name} ${percent(amount / mean(one))}`).join(", ");
  const hidden = one.overlaps.map(({ axis, hidden }) => `${axis} ${percent(hidden)}`).join(", ");
  const beside = hidden && small(`communication beside computing: ${hidden}`);
  return element("span", [stripe(parts, 160, 12, `Where a step's time goes: ${said}`), small(said), beside]);
}

const files = (id, one) =>
  element(
    "span.controls",
    one.files.map((file) =>
      link(
        `${file.name.split("-")[0]}, ${bytes(file.bytes)}`,
        `${jobPath(id)}/profiles/${one.number}/files/${file.name}`,
        { download: true },
      ),
    ),
  );
