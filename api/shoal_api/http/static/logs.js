// The log: the newest lines of all ranks, filtered here by text, rank and level. Events stand beside it, so they are among its
// lines only if that is wanted.
import { $, element } from "./dom.js";
import { clock } from "./format.js";

const MAX_LINES = 5000;
const ERROR = /\b(error|exception|traceback|critical|fatal|failed)\b/i, WARNING = /\bwarn(ing)?\b/i;
let lines = [];
for (const name of ["log-search", "log-rank", "log-level", "log-events"]) $(name).addEventListener("input", () => { $("lines").replaceChildren(); show(lines); });

export function addLines(added) {
  const last = lines.length ? lines[lines.length - 1].seq : 0;
  const fresh = added.filter((line) => line.seq > last);
  lines = [...lines, ...fresh].slice(-MAX_LINES);
  show(fresh);
  while ($("lines").childElementCount > MAX_LINES) $("lines").firstChild.remove();
}

const levelOf = (line) => ERROR.test(line.text) ? "error" : line.stream === "stderr" && WARNING.test(line.text) || WARNING.test(line.text) ? "warning" : "info";

const isEvent = (line) => line.stream === "shoal";

function show(some) {
  const search = $("log-search").value.toLowerCase(), rank = $("log-rank").value, level = $("log-level").value;
  const made = [];
  for (const line of some) {
    const mood = levelOf(line);
    if (isEvent(line) && !$("log-events").checked) continue;
    if (search && !line.text.toLowerCase().includes(search)) continue;
    if (rank !== "" && String(line.rank) !== rank) continue;
    if (level === "error" && mood !== "error" || level === "warning" && mood === "info") continue;
    made.push(element("div", [element("span", `${clock(line.at)} ${line.rank === null ? "-" : `rank ${line.rank}`} `, { class: "dim" }), ...marked(line.text.trimEnd(), search)],
      { class: mood === "error" ? "bad" : mood === "warning" ? "warn" : "" }));
  }
  if (!lines.some((line) => $("log-events").checked || !isEvent(line))) made.push(element("div", "The task has printed nothing yet.", { class: "nothing" }));
  $("lines").querySelector(".nothing")?.remove();
  $("lines").append(...made);
  if ($("follow").checked) $("lines").scrollTop = $("lines").scrollHeight;
}

function marked(text, search) {
  if (!search) return [text];
  const at = text.toLowerCase().indexOf(search);
  return at < 0 ? [text] : [text.slice(0, at), element("mark", text.slice(at, at + search.length)), text.slice(at + search.length)];
}
