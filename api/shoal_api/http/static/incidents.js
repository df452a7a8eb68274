// The incidents of a job, newest first, with what each phase of the recovery took. What belongs together shares a column, so
// that the table fits a window of 1024 pixels.
import { $, element, rows, smallLine } from "./dom.js";
import { bytes, clock, moment, number, seconds, words } from "./format.js";
import { key, PHASES, stripe } from "./stripe.js";

export function showIncidents(incidents) {
  $("calm").hidden = incidents.length > 0;
  rows(
    "incidents",
    [...incidents].reverse(),
    (one) => [
      clock(one.at),
      lines(words(one.cause), one.ranks.length ? `rank ${one.ranks.join(", ")}` : ""),
      suspect(one),
      lines(`${one.from_workers} → ${one.to_workers ?? "…"}`, layouts(one)),
      element("td", one.action || "–", { class: "text" }),
      recovery(one),
      lines(
        number(one.steps_lost),
        [
          one.state_source && `state from ${words(one.state_source)}`,
          one.bytes_moved === null ? "" : bytes(one.bytes_moved),
        ]
          .filter(Boolean)
          .join(", "),
      ),
    ],
    (one) => ({ title: `${moment(one.at)} ${one.witness}: ${one.message}` }),
  );
  $("phases").replaceChildren(...(incidents.length ? PHASES.map((name) => key(name)) : []));
}

const lines = (first, second) => element("div", [element("div", first), ...(second ? [smallLine(second)] : [])]);
// Layouts that did not change are said once.
const layouts = ({ from_layout: from, to_layout: to }) => (!from || from === to ? from : `${from} → ${to ?? "…"}`);

function recovery(one) {
  const took = one.closed
    ? one.recovery_s
      ? seconds(one.recovery_s)
      : "–"
    : element("span", "open", { class: "warn" });
  return element("div", [
    element("div", took),
    ...phases(one),
    ...(one.detect_s ? [smallLine(`detected in ${seconds(one.detect_s)}`)] : []),
  ]);
}

function suspect({ suspect: found }) {
  if (!found) return "–";
  const who = found.ranks.length ? `rank ${found.ranks.join(", ")}` : "no single rank";
  return element(
    "td",
    [
      element("div", `${who}${found.node_ip ? ` on ${found.node_ip}` : ""} (${found.resource})`),
      smallLine(found.evidence.join("; ")),
    ],
    { class: "text" },
  );
}

function phases(incident) {
  const parts = PHASES.map((name) => [name, incident[`${name}_s`] || 0]).filter(([, amount]) => amount > 0);
  return parts.length
    ? [stripe(parts, 110, 12, parts.map(([name, amount]) => `${words(name)} ${seconds(amount)}`).join(", "))]
    : [];
}
