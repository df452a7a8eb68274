// System metrics of a job by rank over time: a heat map rank x time, in which a straggler is a dark row, and its curves.
import { $, element, fillEach } from "./dom.js";
import { jobPath, request } from "./api.js";
import { colours, onThemeChange, PALETTE } from "./looks.js";
import { curve, plot } from "./plot.js";
import { ENDED } from "./states.js";
import { bytes, number, percent, plural, seconds, words } from "./format.js";
import { follow, latest } from "./reading.js";

const PACE_MS = 10_000;
const MAX_LINES = 16;
const NAMES = {
  busy: "busy (not waiting)",
  cpu_cores: "CPUs busy",
  memory_bytes: "memory",
  gpu_busy: "GPU busy",
  gpu_memory_bytes: "GPU memory",
  gpu_celsius: "GPU temperature",
  gpu_watts: "GPU power",
  received_bytes_s: "network, received by the machine",
  sent_bytes_s: "network, sent by the machine",
  read_bytes_s: "disk, read",
  written_bytes_s: "disk, written",
};
const SHARES = ["busy", "data", "forward", "backward", "communication", "optimizer", "snapshot", "other", "gpu_busy"];

export class System {
  constructor(id, shown) {
    this.id = id;
    this.shown = shown;
    this.answer = null;
    this.ask = latest(
      () => this.request(),
      (answer) => {
        this.answer = answer;
        this.draw();
      },
    );
    for (const name of ["system-metric", "system-ranks", "system-since"])
      $(name).addEventListener("change", () => this.read());
    onThemeChange(() => this.draw());
  }

  // Asks again every ten seconds while the job goes on.
  start() {
    follow(() => this.read().then(() => ENDED.has(this.shown.job?.status.state)), PACE_MS);
  }

  read() {
    return this.ask().catch((error) => {
      $("system-said").textContent = error.message;
    });
  }

  request() {
    const since = Number($("system-since").value);
    const query = new URLSearchParams({
      metric: $("system-metric").value || "busy",
      ranks: $("system-ranks").value.replaceAll(" ", ""),
      after: since ? Math.max(0, Date.now() / 1000 - since) : 0,
    });
    return request(`${jobPath(this.id)}/system?${query}`);
  }

  draw() {
    if (!this.answer) return;
    const { metric, metrics, width_s: width, at, ranks, values } = this.answer;
    if (metrics.length && [...$("system-metric").options].map((one) => one.value).join() !== metrics.join()) {
      fillEach("system-metric", metrics, (name) =>
        element("option", NAMES[name] ?? words(name), { value: name, selected: name === metric }),
      );
    }
    const isEmpty = !values.some((row) => row.some((value) => value !== null));
    for (const name of ["system-map", "system-lines"]) $(name).hidden = isEmpty;
    $("system-said").replaceChildren(isEmpty ? "Nothing was measured in this time." : outlier(this.answer));
    if (isEmpty) return $("system-width").replaceChildren();
    const colour = colours(),
      times = at.map((one) => new Date(one * 1000)),
      span = [at[0] - width / 2, at.at(-1) + width / 2].map((one) => new Date(one * 1000)),
      scale = scaleOf(metric, values);
    $("system-width").replaceChildren(
      `means over ${seconds(width)}; pale is ${said(metric, scale[0])}, strong is ${said(metric, scale[1])}`,
    );
    const layout = (height, more) => ({
      height,
      margin: { l: 60, r: 10, t: 8, b: 34 },
      xaxis: { type: "date", range: span, gridcolor: colour.line },
      ...more,
    });
    plot(
      "system-map",
      [
        {
          type: "heatmap",
          x: times,
          y: ranks.map((rank) => `rank ${rank}`),
          z: values,
          text: values.map((row) => row.map((value) => said(metric, value))),
          hovertemplate: "%{y}, %{x}: %{text}<extra></extra>",
          // without a gap, and with a colour bar, Plotly sets an inline style, which the policy forbids
          ygap: ranks.length > 64 ? 0.01 : 1,
          hoverongaps: false,
          colorscale: [
            [0, colour.card],
            [1, colour.run],
          ],
          zmin: scale[0],
          zmax: scale[1],
          showscale: false,
        },
      ],
      layout(Math.min(900, 80 + Math.max(4, 20 * ranks.length)), {
        yaxis: { autorange: "reversed", type: "category", showgrid: false },
      }),
    );
    const lines = shownRows(this.answer).map(({ name, row }, index) =>
      curve(0, name, times, row, PALETTE[index % PALETTE.length], {
        mode: times.length > 60 ? "lines" : "lines+markers",
        text: row.map((value) => said(metric, value)),
        hovertemplate: `${name}: %{text}<extra></extra>`,
      }),
    );
    plot(
      "system-lines",
      lines,
      layout(260, {
        hovermode: "x",
        showlegend: true,
        legend: { orientation: "h", y: -0.2 },
        yaxis: { gridcolor: colour.line, rangemode: "tozero", tickformat: SHARES.includes(metric) ? ".0%" : ".3s" },
      }),
    );
  }
}

const known = (row) => row.filter((value) => value !== null);
const mean = (row) =>
  known(row).length ? known(row).reduce((sum, value) => sum + value, 0) / known(row).length : null;

// Of a share the whole, so that equal ranks look equal; of others from 0 to the largest.
function scaleOf(metric, values) {
  return [0, SHARES.includes(metric) ? 1 : Math.max(1e-9, ...values.map((row) => Math.max(0, ...known(row))))];
}

// A curve of each rank, or for many ranks the lowest, the middle and the highest at each time.
function shownRows({ ranks, values, at }) {
  if (ranks.length <= MAX_LINES) return ranks.map((rank, index) => ({ name: `rank ${rank}`, row: values[index] }));
  const sorted = at.map((_, column) => known(values.map((row) => row[column])).sort((one, other) => one - other));
  const pick = (share) =>
    sorted.map((column) => (column.length ? column[Math.round(share * (column.length - 1))] : null));
  return [
    ["lowest", 0],
    ["median", 0.5],
    ["highest", 1],
  ].map(([name, share]) => ({ name, row: pick(share) }));
}

// In words what the map shows, also for people who do not see it.
function outlier({ metric, ranks, values }) {
  const means = ranks
    .map((rank, index) => ({ rank, value: mean(values[index]) }))
    .filter((one) => one.value !== null)
    .sort((one, other) => other.value - one.value);
  if (means.length < 2) return `Rank ${means[0].rank}: ${said(metric, means[0].value)} on average.`;
  return `Highest: rank ${means[0].rank} with ${said(metric, means[0].value)}; lowest: rank ${means.at(-1).rank} with ${said(metric, means.at(-1).value)}; ${plural(means.length, "rank")}, means over the time shown.`;
}

function said(metric, value) {
  if (value === null || value === undefined) return "–";
  if (SHARES.includes(metric)) return percent(value);
  if (metric.endsWith("bytes_s")) return `${bytes(value)}/s`;
  if (metric.endsWith("bytes")) return bytes(value);
  return { gpu_celsius: `${number(value, 3)} °C`, gpu_watts: `${number(value, 3)} W` }[metric] ?? number(value, 3);
}
