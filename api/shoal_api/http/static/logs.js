// The log: the lines of all ranks, filtered here by text, rank, level and time. The page is sent the newest lines; the older ones
// are read when somebody looks for one: by a filter, at the top, or by the address of a line. Events have a tab of their own, so they
// are among the lines only if that is wanted. The time of a line is a link to it.
import { $, element } from "./dom.js";
import { jobPath, request } from "./api.js";
import { clock, moment, plural, whole } from "./format.js";
import { LineList } from "./line_list.js";

const MAX_LINES = 100000,
  SLACK = 1000,
  PER_ANSWER = 10000;
const FILTERS = ["log-search", "log-rank", "log-level", "log-from", "log-events"];
let lines = [],
  filter = null,
  search = null,
  wanted = null,
  job = null;
let isWhole = false,
  reading = null,
  isCatchingUp = false,
  wasSent = false;
const list = new LineList($("lines"), $("log-lines"), lineElement, () => readOlder());
for (const name of FILTERS)
  $(name).addEventListener("input", () => {
    again();
    history.replaceState(null, "", `#${new URLSearchParams({ tab: "logs", ...filters() })}`);
    const line = shownOf(wanted?.number);
    if (line) list.reveal(line);
    readOlder();
  });
$("follow").addEventListener("input", () => {
  if ($("follow").checked) list.toEnd();
});

// What the filters hold, for the address; and from it. Each has the end of its id as its name.
const IN_ADDRESS = ["search", "rank", "level", "from"];
export const filters = () =>
  Object.fromEntries(IN_ADDRESS.map((name) => [name, $(`log-${name}`).value]).filter(([, value]) => value));
export function takeFilters(address) {
  for (const name of IN_ADDRESS) if (address.has(name)) $(`log-${name}`).value = address.get(name);
  again();
}

// The line that the address names, as soon as it is there; 0: none. `go(number)`: puts a line into the address.
export async function goToLine(number, go) {
  wanted = { number, go };
  if (!lines.length) return;
  if (!number) {
    if ($("follow").checked) list.toEnd();
    return;
  }
  $("follow").checked = false;
  if (!numbered(number)) await readOlder();
  const line = numbered(number);
  if (line && !accepted()(line))
    for (const name of FILTERS) {
      if (name === "log-events") $(name).checked = isEvent(line);
      else $(name).value = "";
    }
  again();
  if (line) list.reveal(line);
  else $("log-said").textContent = `There is no line ${number}.`;
}

// The button that saves all lines which pass the filters, also those that are not on the page.
export function downloadOf(id) {
  job = id;
  $("log-download").addEventListener("click", async () => {
    const found = [],
      passes = accepted();
    try {
      await pages(0, Infinity, (page) => {
        found.push(...page.filter(passes));
        $("log-said").textContent = `${plural(found.length, "line")} so far`;
      });
    } catch (error) {
      $("log-said").textContent = error.message;
      return;
    }
    const text = found
      .map(
        (line) =>
          `${new Date(line.at * 1000).toISOString()} ${line.rank === null ? "-" : `rank ${line.rank}`} ${line.text.trimEnd()}\n`,
      )
      .join("");
    const saved = element("a", "", {
      href: URL.createObjectURL(new Blob([text], { type: "text/plain" })),
      download: `${id}.log`,
    });
    saved.click();
    URL.revokeObjectURL(saved.href);
    $("log-said").textContent = `${plural(found.length, "line")} saved`;
  });
}

// From the stream. If lines between those here and these were not sent, because the page was hidden, they are read.
export function addLines(added) {
  const last = lines.at(-1)?.seq ?? 0,
    fresh = added.filter((line) => line.seq > last),
    isFirst = !lines.length;
  if (isCatchingUp) {
    wasSent = true;
    return;
  }
  if (!isFirst && fresh.length && fresh[0].seq > last + 1) {
    catchUp();
    return;
  }
  take(fresh.map(prepared));
  if (isFirst && wanted?.number) goToLine(wanted.number, wanted.go);
  if (isFirst && FILTERS.some(isSet)) readOlder();
}

const failed = (error) => {
  $("log-said").textContent = error.message;
};

async function catchUp() {
  isCatchingUp = true;
  do {
    wasSent = false;
    await pages(lines.at(-1).seq, Infinity, take).catch(failed);
  } while (wasSent);
  isCatchingUp = false;
}

// Reads what is older than the lines here, once; what is asked for meanwhile waits for the same.
function readOlder() {
  if (isWhole || !lines.length || lines[0].seq === 1) return Promise.resolve();
  const first = lines[0].seq,
    found = [];
  reading ??= pages(0, first, (page) => {
    found.push(...page);
    $("log-said").textContent = `${plural(found.length, "older line")} read so far`;
  })
    .then(() => {
      isWhole = true;
      lines = [...found, ...lines];
      list.prepend(found.filter(filter));
      trim();
      sayNum();
    })
    .catch(failed)
    .finally(() => {
      reading = null;
    });
  return reading;
}

// The lines between two numbers, a page at a time.
async function pages(after, until, takePage) {
  for (;;) {
    const page = await request(`${jobPath(job)}/logs?after=${after}&limit=${PER_ANSWER}`),
      found = page.items.filter((line) => line.seq < until);
    takePage(found.map(prepared));
    if (
      found.length < page.items.length ||
      !page.items.length ||
      page.next_after === after ||
      page.next_after >= until - 1
    )
      return;
    after = page.next_after;
  }
}

function take(fresh) {
  lines.push(...fresh);
  list.append(fresh.filter(filter));
  trim();
  sayNum();
  if ($("follow").checked) list.toEnd();
}

// The oldest lines go, some at a time: the list drops whole blocks.
function trim() {
  if (lines.length <= MAX_LINES + SLACK) return;
  const gone = lines.splice(0, lines.length - MAX_LINES);
  isWhole = true;
  list.dropFirst(gone.filter(filter).length);
}

// All lines are filtered anew.
function again() {
  filter = accepted();
  list.replace(lines.filter(filter));
  sayNum();
  if ($("follow").checked) list.toEnd();
}

function sayNum() {
  const num = list.blocks.reduce((sum, block) => sum + block.lines.length, 0),
    isPrinted = () => lines.some((line) => $("log-events").checked || !isEvent(line));
  $("log-said").textContent = FILTERS.some(isSet) ? `${whole(num)} of ${plural(lines.length, "line")}` : "";
  $("log-none").textContent = num
    ? ""
    : $("log-search").validationMessage
      ? $("log-search").validationMessage
      : isPrinted()
        ? "No line passes the filters."
        : "The task has printed nothing.";
}

const isSet = (name) => name !== "log-events" && $(name).value !== "";
const numbered = (number) => lines.find((one) => one.seq === number);
const shownOf = (number) => {
  const line = number && numbered(number);
  return line && filter(line) ? line : null;
};

function accepted() {
  const { find, mistake } = finder($("log-search").value),
    rank = $("log-rank").value,
    level = $("log-level").value,
    withEvents = $("log-events").checked;
  const from = $("log-from").value ? new Date($("log-from").value).getTime() / 1000 : -Infinity;
  search = find;
  $("log-search").setCustomValidity(mistake);
  return (line) =>
    (withEvents || !isEvent(line)) &&
    (rank === "" || String(line.rank) === rank) &&
    line.at >= from &&
    find(line) !== null &&
    (!level || line.level === "error" || (level === "warning" && line.level === "warning"));
}

function lineElement(line) {
  const time = element("a", clock(line.at), {
    href: `#tab=logs&line=${line.seq}`,
    title: `line ${line.seq}, ${moment(line.at)}`,
    click: (event) => {
      event.preventDefault();
      wanted.go(line.seq);
    },
  });
  return element(
    "div",
    [time, element("span.dim", ` ${line.rank === null ? "-" : `rank ${line.rank}`} `), ...marked(line)],
    {
      class: [
        "line",
        line.level === "error" ? "bad" : line.level === "warning" ? "warn" : "",
        line.seq === wanted?.number ? "chosen" : "",
      ]
        .join(" ")
        .trim(),
    },
  );
}

function marked(line) {
  const [at, length] = search(line) ?? [0, 0],
    text = line.text.trimEnd();
  return length ? [text.slice(0, at), element("mark", text.slice(at, at + length)), text.slice(at + length)] : [text];
}

// What filters look at in a line, and what the search finds.
const ERROR = /\b(error|exception|traceback|critical|fatal|failed)\b/i,
  WARNING = /\bwarn(ing)?\b/i;

const isEvent = (line) => line.stream === "shoal";
const levelOf = ({ text }) => (ERROR.test(text) ? "error" : WARNING.test(text) ? "warning" : "info");
// Made once for a line, when it comes.
const prepared = (line) => ({ ...line, low: line.text.toLowerCase(), level: levelOf(line) });

// Words are looked for in any case, and so is a regular expression between slashes: /loss (nan|inf)/. find(line): the place of the first
// hit and its length, or null. mistake: what is wrong with the expression, which then finds nothing.
function finder(words) {
  const low = words.toLowerCase(),
    between = /^\/(.+)\/$/.exec(words);
  if (!between)
    return {
      mistake: "",
      find(line) {
        const at = line.low.indexOf(low);
        return at < 0 ? null : [at, low.length];
      },
    };
  try {
    const pattern = new RegExp(between[1], "iu");
    return {
      mistake: "",
      find({ text }) {
        const hit = pattern.exec(text.trimEnd());
        return hit && [hit.index, hit[0].length];
      },
    };
  } catch (error) {
    return { mistake: error.message, find: () => null };
  }
}

filter = accepted();
