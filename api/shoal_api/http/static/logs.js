// The log: the newest lines of all ranks, filtered here by text, rank, level and time. Events have a tab of their own, so they are
// among its lines only if that is wanted. The time of a line is a link to it; a line that is older than those here is fetched.
import { $, element } from "./dom.js";
import { jobPath, request } from "./api.js";
import { clock, moment, plural } from "./format.js";

const MAX_LINES = 5000, AROUND = 200, PER_ANSWER = 10000;
const FILTERS = ["log-search", "log-rank", "log-level", "log-from", "log-events"];
const ERROR = /\b(error|exception|traceback|critical|fatal|failed)\b/i, WARNING = /\bwarn(ing)?\b/i;
let lines = [], wanted = null, job = null;
for (const name of FILTERS) $(name).addEventListener("input", again);

// A reader of an older line does not lose it to newer ones at once.
const mostLines = () => $("follow").checked ? MAX_LINES : 4 * MAX_LINES;

function again() { $("lines").replaceChildren(); show(lines); }

// The line that the address names, as soon as it is there; 0: none. `go(number)`: puts a line into the address.
export async function goToLine(number, go) {
  wanted = { number, go };
  if (!number || !lines.length) return;
  if (!lines.some((line) => line.seq === number)) {
    const { items } = await request(`${jobPath(job)}/logs?after=${Math.max(0, number - AROUND)}&limit=${2 * AROUND}`);
    const known = new Set(lines.map((line) => line.seq));
    lines = [...items.filter((line) => !known.has(line.seq)), ...lines].sort((one, other) => one.seq - other.seq);
  }
  $("follow").checked = false;
  const line = lines.find((one) => one.seq === number);
  if (line && !passes(line)) for (const name of FILTERS) { if (name === "log-events") $(name).checked = isEvent(line); else $(name).value = ""; }
  again();
  $("log-said").textContent = line ? "" : `There is no line ${number}.`;
  $("lines").querySelector(".chosen")?.scrollIntoView({ block: "center" });
}

// The button that saves all lines which pass the filters, also those that are not on the page.
export function downloadOf(id) {
  job = id;
  $("log-download").addEventListener("click", async () => {
    const found = [];
    let after = 0;
    try {
      for (;;) {
        const page = await request(`${jobPath(id)}/logs?after=${after}&limit=${PER_ANSWER}`);
        found.push(...page.items.filter(passes));
        if (!page.items.length || page.next_after === after) break;
        after = page.next_after;
        $("log-said").textContent = `${plural(found.length, "line")} so far`;
      }
    } catch (error) { $("log-said").textContent = error.message; return; }
    const text = found.map((line) => `${new Date(line.at * 1000).toISOString()} ${line.rank === null ? "-" : `rank ${line.rank}`} ${line.text.trimEnd()}\n`).join("");
    const saved = element("a", "", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: `${id}.log` });
    saved.click();
    URL.revokeObjectURL(saved.href);
    $("log-said").textContent = `${plural(found.length, "line")} saved`;
  });
}

export function addLines(added) {
  const last = lines.length ? lines[lines.length - 1].seq : 0;
  const fresh = added.filter((line) => line.seq > last);
  const isFirst = !lines.length;
  lines = [...lines, ...fresh].slice(-mostLines());
  show(fresh);
  if (isFirst && wanted?.number) goToLine(wanted.number, wanted.go);
  while ($("lines").childElementCount > mostLines()) $("lines").firstChild.remove();
}

const levelOf = (line) => ERROR.test(line.text) ? "error" : line.stream === "stderr" && WARNING.test(line.text) || WARNING.test(line.text) ? "warning" : "info";

const isEvent = (line) => line.stream === "shoal";

function passes(line) {
  const search = $("log-search").value.toLowerCase(), rank = $("log-rank").value, level = $("log-level").value, from = $("log-from").value, mood = levelOf(line);
  if (isEvent(line) && !$("log-events").checked) return false;
  if (search && !line.text.toLowerCase().includes(search)) return false;
  if (rank !== "" && String(line.rank) !== rank) return false;
  if (from && line.at < new Date(from).getTime() / 1000) return false;
  return !(level === "error" && mood !== "error" || level === "warning" && mood === "info");
}

function show(some) {
  const search = $("log-search").value.toLowerCase();
  const made = some.filter(passes).map((line) => {
    const mood = levelOf(line), time = element("a", clock(line.at), { href: `#tab=logs&line=${line.seq}`, title: `line ${line.seq}, ${moment(line.at)}`, click: (event) => { event.preventDefault(); wanted.go(line.seq); } });
    return element("div", [time, element("span", ` ${line.rank === null ? "-" : `rank ${line.rank}`} `, { class: "dim" }), ...marked(line.text.trimEnd(), search)],
      { class: [mood === "error" ? "bad" : mood === "warning" ? "warn" : "", line.seq === wanted?.number ? "chosen" : ""].join(" ").trim() });
  });
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
