// The events of a job, newest first. Words and severity come from the service; see docs/reference/events.md.
import { $, element } from "./dom.js";
import { clock, moment } from "./format.js";

const SEVERITY = { info: "", success: "done", warning: "warn", error: "bad" };
const MAX_EVENTS = 500;

export function addEvents(known, added) {
  const last = known.length ? known[known.length - 1].seq : 0;
  const fresh = added.filter((event) => event.seq > last);
  if (last && fresh.length && fresh[0].seq > last + 1) {
    known = [];
    $("events").replaceChildren();
  } // the page was hidden, and not all that came meanwhile was sent
  $("events").prepend(
    ...fresh
      .map((event) =>
        element("div", [element("span", `${clock(event.at)} `, { class: "dim" }), event.message], {
          class: SEVERITY[event.severity],
          title: `${moment(event.at)} ${event.type}`,
        }),
      )
      .reverse(),
  );
  while ($("events").childElementCount > MAX_EVENTS) $("events").lastChild.remove();
  return [...known, ...fresh].slice(-MAX_EVENTS);
}
