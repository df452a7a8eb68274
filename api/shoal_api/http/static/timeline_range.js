// The time that the page of the fleet shows: the range that was chosen, which its address keeps (?hours=6), or the smallest
// usual one that holds what happened lately. machines.js calls it.
import { $ } from "./dom.js";
import { request } from "./api.js";

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
