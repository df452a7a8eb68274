// What has happened to a job: its incidents, newest first, with what each phase of the recovery took; its events, whose words and severity
// come from the service, see docs/reference/events.md; and where its worker time went.
import { $, element, fillEach, rows, smallLine } from "./dom.js";
import { bytes, clock, joined, moment, number, percent, seconds, words } from "./format.js";
import { CATEGORIES, causesOf, key, PHASES, stripe } from "./stripe.js";

export function showIncidents(incidents) {
  rows("incidents", [...incidents].reverse(), (one) => [
    clock(one.at),
    lines(words(one.cause), one.ranks.length ? `rank ${one.ranks.join(", ")}` : ""),
    suspect(one),
    lines(`${one.from_workers} → ${one.to_workers ?? "…"}`, layouts(one)),
    element("td.text", one.action || "–"),
    recovery(one),
    lines(
      number(one.steps_lost),
      joined([
        one.state_source && `state from ${words(one.state_source)}`,
        one.bytes_moved === null ? "" : bytes(one.bytes_moved),
      ]),
    ),
    { title: `${moment(one.at)} ${one.witness}: ${one.message}` },
  ]);
  fillEach("phases", incidents.length ? PHASES : [], (name) => key(name));
}

const lines = (first, second) => element("div", [element("div", first), second ? smallLine(second) : null]);
// Layouts that did not change are said once.
const layouts = ({ from_layout: from, to_layout: to }) => (!from || from === to ? from : `${from} → ${to ?? "…"}`);

function recovery(one) {
  const took = one.closed ? (one.recovery_s ? seconds(one.recovery_s) : "–") : element("span.warn", "open");
  return element("div", [
    element("div", took),
    ...phases(one),
    one.detect_s ? smallLine(`detected in ${seconds(one.detect_s)}`) : null,
  ]);
}

function suspect({ suspect: found }) {
  if (!found) return "–";
  const who = found.ranks.length ? `rank ${found.ranks.join(", ")}` : "no single rank";
  return element("td.text", [
    element("div", `${who}${found.node_ip ? ` on ${found.node_ip}` : ""} (${found.resource})`),
    smallLine(found.evidence.join("; ")),
  ]);
}

function phases(incident) {
  const parts = PHASES.map((name) => [name, incident[`${name}_s`] || 0]).filter(([, amount]) => amount > 0);
  return parts.length
    ? [stripe(parts, 110, 12, parts.map(([name, amount]) => `${words(name)} ${seconds(amount)}`).join(", "))]
    : [];
}

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
        element("div", [element("span.dim", `${clock(event.at)} `), event.message], {
          class: SEVERITY[event.severity],
          title: `${moment(event.at)} ${event.type}`,
        }),
      )
      .reverse(),
  );
  while ($("events").childElementCount > MAX_EVENTS) $("events").lastChild.remove();
  return [...known, ...fresh].slice(-MAX_EVENTS);
}

// Goodput: the accounts of the job as a stripe with its key.
export function showAccounts(goodput) {
  const total = goodput ? goodput.total : 0;
  $("accounts").hidden = !total;
  $("ratio").textContent = total
    ? `${percent(goodput.ratio)} of ${seconds(total)} of requested worker time`
    : "no worker time yet";
  const parts = total
    ? CATEGORIES.map((name) => [name, goodput.seconds[name] || 0]).filter(([, amount]) => amount > 0)
    : [];
  $("stripe").replaceChildren(stripe(parts, 900, 20, "Worker time by category"));
  fillEach("categories", parts, ([name, amount]) =>
    key(name, `${percent(amount / total)}, ${seconds(amount)}`, name === "recovering" ? causesOf(goodput) : ""),
  );
}
