// The form that starts a sweep. Each line of its values is a key and a list, or a range from which numbers are drawn.
import { $, attempt, onSubmit, say } from "./dom.js";
import { post, validated } from "./api.js";
import { plural } from "./format.js";
import { example } from "./new_job.js";

const VALUES = "optimizer.lr: 1e-4, 3e-4, 1e-3\nseed: 1, 2\n";
const FIELDS = ["samples", "seed", "limit", "warmup_steps", "reduction"];

export function setUpStart() {
  $("sweep-yaml").value = sessionStorage.getItem("shoal.spec") || example("my-sweep");
  $("values").value = sessionStorage.getItem("shoal.sweep") || VALUES;
  $("new").addEventListener("click", () => {
    const open = $("start").hidden;
    $("start").hidden = !open;
    $("new").setAttribute("aria-expanded", String(open));
    if (open) {
      $("values").focus();
      tell();
    }
  });
  $("close").addEventListener("click", () => {
    $("start").hidden = true;
    $("new").setAttribute("aria-expanded", "false");
    $("new").focus();
  });
  $("start-form").addEventListener("input", () => {
    sessionStorage.setItem("shoal.sweep", $("values").value);
    $("rule-reduction").hidden = $("prune").value !== "halving";
    $("rule-warmup").hidden = !$("prune").value;
    tell();
  });
  onSubmit("start-form", () => attempt(start, "verdict", "submit"));
  $("rule-reduction").hidden = $("rule-warmup").hidden = true;
}

// How many jobs the form asks for, or what is wrong with it.
function tell() {
  try {
    say("verdict", `${plural(sizeOf(asked()), "job")}.`, "dim");
    $("submit").disabled = false;
  } catch (error) {
    say("verdict", error.message, "error");
    $("submit").disabled = true;
  }
}

function asked() {
  const body = { ...readValues($("values").value) };
  for (const name of FIELDS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("prune").value) body.prune = $("prune").value;
  else delete body.warmup_steps;
  if (body.prune !== "halving") delete body.reduction;
  if ($("name").value.trim()) body.name = $("name").value.trim();
  if (Object.keys(body.ranges).length && !body.samples) throw new Error("A range is drawn from: say how many jobs.");
  return body;
}

export const sizeOf = ({ samples, grid }) =>
  samples ?? Object.values(grid).reduce((product, values) => product * values.length, 1);

// "key: a, b" is a list; "key: 1e-5 .. 1e-2 log" a range, of whole numbers if both ends are written as such.
export function readValues(text) {
  const grid = {},
    ranges = {};
  for (const line of text
    .split("\n")
    .map((one) => one.trim())
    .filter(Boolean)) {
    const [, key, values] = /^([^:\s]+)\s*:\s*(.+)$/.exec(line) ?? [];
    if (!key)
      throw new Error(`${line}: write KEY: VALUE, VALUE or KEY: LOW .. HIGH, for example optimizer.lr: 1e-4, 3e-4`);
    if (key in grid || key in ranges) throw new Error(`${key} is given twice.`);
    const range = /^(\S+)\s*\.\.\s*(\S+?)(\s+log)?$/.exec(values);
    if (!range) {
      grid[key] = split(values);
      continue;
    }
    const [, low, high, log] = range;
    if (![low, high].every((end) => end !== "" && Number.isFinite(Number(end))))
      throw new Error(`${line}: the ends of a range are numbers.`);
    ranges[key] = {
      low: Number(low),
      high: Number(high),
      scale: log ? "log" : "linear",
      whole: [low, high].every((end) => /^[+-]?\d+$/.test(end)),
    };
  }
  if (!Object.keys(grid).length && !Object.keys(ranges).length)
    throw new Error("Write the values to try, for example optimizer.lr: 1e-4, 3e-4");
  return { grid, ranges };
}

// Commas outside of brackets and quotes separate values.
function split(text) {
  const parts = [""];
  let depth = 0,
    quote = "";
  for (const char of text) {
    if (quote) quote = char === quote ? "" : quote;
    else if ("'\"".includes(char)) quote = char;
    else depth += "[{(".includes(char) - "]})".includes(char);
    if (char === "," && !quote && depth === 0) parts.push("");
    else parts[parts.length - 1] += char;
  }
  const found = parts.map((part) => part.trim());
  if (found.some((part) => !part)) throw new Error(`${text}: a value is missing.`);
  return found;
}

async function start() {
  const body = asked(),
    found = await validated($("sweep-yaml").value);
  if (!found.valid) throw new Error(found.words);
  const { sweep: _, ...spec } = found.spec;
  location.href = sweepPage(await post("/v1/sweeps", { ...body, spec }));
}

export const sweepPage = ({ name, project }) =>
  `/sweeps?label=${encodeURIComponent(`sweep=${name}`)}&project=${encodeURIComponent(project)}`;
