// The jobs with a label as one table, and as parallel coordinates: an axis for each label, then the results.
import { $, element, fill, link, row, said } from "./dom.js";
import { jobPage, request } from "./api.js";
import { Live } from "./live.js";
import { number, percent, plural, steps } from "./format.js";
import { badge } from "./states.js";
import { colours, onThemeChange } from "./theme.js";

const RESULTS = [["Loss", "loss"], ["Validation loss", "val_loss"], ["Tokens/s", "tokens_per_s"], ["Goodput", "goodput"], ["Incidents", "incidents"]];
const label = new URLSearchParams(location.search).get("label") || "";
let items = [], order = "Loss", up = true;
$("label").value = label;
$("pick").addEventListener("submit", (event) => { event.preventDefault(); location.search = `?label=${encodeURIComponent($("label").value.trim())}`; });
onThemeChange(() => draw(labelsOf(items)));

const live = new Live({ fleet(fleet) {
  items = fleet.items;
  $("words").textContent = items.length ? `${plural(fleet.total, "job")} with ${label}${fleet.total > items.length ? `; the newest ${items.length} are shown` : ""}` : `No job has the label ${label}.`;
  $("axes").hidden = items.length < 2;
  $("list").hidden = !items.length;
  show();
} });
if (label) live.open(`/v1/overview?limit=200&label=${encodeURIComponent(label)}`);
else newestSweeps();

// Without a label: links to the newest sweeps.
async function newestSweeps() {
  const { items: found } = await request("/v1/sweeps");
  if (found.length) fill("sweeps", found.map(({ name, num_jobs }) => element("li", link(`${name} (${plural(num_jobs, "job")})`, `/sweeps?label=${encodeURIComponent(`sweep=${name}`)}`))));
}

// The labels that differ: the parameters of the sweep.
const labelsOf = (jobs) => [...new Set(jobs.flatMap((job) => Object.keys(job.labels)))].sort().filter((name) => new Set(jobs.map((job) => job.labels[name])).size > 1);

function show() {
  const names = labelsOf(items);
  const columns = [["Job", (job) => job.name], ["State", (job) => job.state], ...names.map((name) => [name, (job) => numeric(job.labels[name])]), ["Step", (job) => job.step], ...RESULTS.map(([title, key]) => [title, (job) => job[key]]), ["Why", (job) => job.message]];
  const value = columns.find(([title]) => title === order)?.[1] ?? columns[0][1];
  const sorted = [...items].sort((a, b) => compare(value(a), value(b)) * (up ? 1 : -1));
  fill("heads", columns.map(([title]) => element("th", element("button", title + (title === order ? (up ? " ▴" : " ▾") : ""), { type: "button", click: () => { up = title === order ? !up : true; order = title; show(); } }),
    { "aria-sort": title === order ? (up ? "ascending" : "descending") : "none" })));
  fill("jobs", sorted.map((job) => row([element("td", said(link(job.name, jobPage(job.id), { title: job.id })), { class: "title" }), element("td", [badge(job.state), job.reason === "pruned" ? " pruned" : ""], { class: "title" }), ...names.map((name) => job.labels[name] ?? "–"), steps(job), number(job.loss), number(job.val_loss), number(job.tokens_per_s), percent(job.goodput), job.incidents, element("td", job.state === "RUNNING" ? "" : job.message, { class: "text" })], { class: "row" })));
  draw(names);
}

const numeric = (text) => text !== undefined && text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
function compare(a, b) {
  if (a === null || a === undefined || b === null || b === undefined) return (a === null || a === undefined) - (b === null || b === undefined);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

// Lines between axes of ordinary scatter traces: Plotly's own parallel coordinates need WebGL, which many machines lack.
function draw(names) {
  if (items.length < 2) return;
  const colour = colours();
  const results = RESULTS.filter(([, key]) => items.some((job) => typeof job[key] === "number"));
  const axes = [...names.map((name) => scale(name, items.map((job) => numeric(job.labels[name]) ?? null))), ...results.map(([title, key]) => scale(title, items.map((job) => job[key] ?? null)))];
  const loss = scale("Loss", items.map((job) => job.loss));
  const traces = items.map((job, index) => ({ type: "scatter", mode: "lines+markers", name: job.name, x: axes.map((axis) => axis.title), y: axes.map((axis) => axis.y[index]), text: axes.map((axis) => String(axis.values[index] ?? "–")),
    connectgaps: false, line: { width: 2, color: shade(loss.y[index]) }, marker: { size: 6 }, hovertemplate: "%{x}: %{text}" }));
  const ends = axes.flatMap((axis) => [[axis.low, 0, "top"], [axis.high, 1, "bottom"]].map(([text, y, anchor]) => ({ x: axis.title, y, text: String(text), showarrow: false, yanchor: anchor, font: { size: 10, color: colour.dim } })));
  window.Plotly.react($("chart"), traces, { height: 420, margin: { l: 40, r: 40, t: 30, b: 50 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour.ink, size: 12 }, showlegend: false, annotations: ends,
    hovermode: "closest", xaxis: { type: "category", gridcolor: colour.dim, gridwidth: 1.5, fixedrange: true }, yaxis: { visible: false, range: [-0.12, 1.12], fixedrange: true } }, { responsive: true, displaylogo: false });
}

// Places between 0 and 1; words take equal distances.
function scale(title, values) {
  const known = values.filter((value) => value !== null);
  if (known.every((value) => typeof value === "number")) {
    const low = Math.min(...known), high = Math.max(...known);
    return { title, values, low: number(low), high: number(high), y: values.map((value) => value === null ? null : high === low ? 0.5 : (value - low) / (high - low)) };
  }
  const words = [...new Set(known.map(String))].sort(compare);
  return { title, values, low: words[0], high: words[words.length - 1], y: values.map((value) => value === null ? null : words.length === 1 ? 0.5 : words.indexOf(String(value)) / (words.length - 1)) };
}

// Green is the lowest loss, red the highest.
const shade = (share) => `hsl(${Math.round(150 - 145 * (share ?? 1))} 65% 45%)`;
