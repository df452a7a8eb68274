// The curves of all jobs of a sweep over each other, the best value so far, and how much each parameter matters. The service
// bounds the number of points. Curves of a kind are one trace, so that two hundred jobs are drawn at once.
import { $, element, link } from "./dom.js";
import { jobPage } from "./api.js";
import { moment, number, plural } from "./format.js";
import { plot } from "./plot.js";
import { colours, PALETTE } from "./theme.js";

const HIGHLIGHTED = 3;

// jobs: of the sweep, the best first.
export function drawCurves(found, jobs) {
  const byId = new Map(jobs.map((job, rank) => [job.id, { ...job, rank }])),
    colour = colours(),
    axis = $("over").value;
  const known = found.jobs.filter((one) => one.step.length && byId.has(one.id)),
    few = known.length <= PALETTE.length;
  const best = `best ${HIGHLIGHTED}`;
  const kinds = few
    ? Object.fromEntries(
        known.map(({ id }, index) => [
          byId.get(id).name,
          [PALETTE[index], 1.8, byId.get(id).reason === "pruned" ? "dot" : "solid"],
        ]),
      )
    : { pruned: [colour.bad, 1, "dot"], others: [colour.dim, 1, "solid"], [best]: [colour.run, 2.4, "solid"] };
  const lines = Object.fromEntries(Object.keys(kinds).map((kind) => [kind, { x: [], y: [], text: [] }]));
  const begin = Math.min(...found.jobs.flatMap((one) => one.at.slice(0, 1)));
  for (const one of known) {
    const job = byId.get(one.id);
    const line = lines[few ? job.name : job.reason === "pruned" ? "pruned" : job.rank < HIGHLIGHTED ? best : "others"];
    line.x.push(...(axis === "time" ? one.at.map((at) => at - begin) : one.step), null);
    line.y.push(...one.value, null);
    line.text.push(...one.value.map(() => job.name), "");
  }
  const traces = Object.entries(lines)
    .filter(([, line]) => line.x.length)
    .map(([kind, line]) => ({
      ...line,
      type: "scatter",
      mode: "lines",
      name: kind,
      connectgaps: false,
      line: { color: kinds[kind][0], width: kinds[kind][1], dash: kinds[kind][2] },
      opacity: kind === "others" ? 0.6 : 1,
      hovertemplate: "%{text}: %{y:.5g}<extra></extra>",
    }));
  const ended = known.filter((one) => byId.get(one.id).reason === "pruned");
  if (ended.length)
    traces.push({
      type: "scatter",
      mode: "markers",
      name: "pruned here",
      x: ended.map((one) => (axis === "time" ? one.at.at(-1) - begin : one.step.at(-1))),
      y: ended.map((one) => one.value.at(-1)),
      text: ended.map((one) => byId.get(one.id).name),
      marker: { symbol: "x", size: 7, color: colour.bad },
      hovertemplate: "%{text} was pruned: %{y:.5g}<extra></extra>",
    });
  plot("curves-chart", traces, {
    height: 380,
    hovermode: "closest",
    showlegend: true,
    legend: { orientation: "h", y: 1.12 },
    xaxis: {
      title: { text: axis === "time" ? "seconds since the first step" : "step" },
      gridcolor: colour.line,
      zeroline: false,
    },
    yaxis: { type: $("log").checked ? "log" : "linear", gridcolor: colour.line, zeroline: false },
  });
  $("curves-chart").setAttribute(
    "aria-label",
    `Curves of ${plural(known.length, "job")}${ended.length ? `, ${ended.length} pruned` : ""}`,
  );
  $("curves-words").textContent =
    `${plural(known.length, "job")} with values${ended.length ? `, ${ended.length} pruned (×)` : ""}${found.steps_per_point > 1 ? `; each point is the mean of ${found.steps_per_point} steps` : ""}.`;
}

export function drawBest(found, jobs) {
  const colour = colours(),
    names = new Map(jobs.map((job) => [job.id, job.name])),
    { best } = found;
  $("best-card").hidden = !best.length;
  if (!best.length) return;
  const last = Math.max(best.at(-1).at, ...found.jobs.flatMap((one) => one.at.slice(-1)));
  const points = [...best, { ...best.at(-1), at: last }];
  plot(
    "best-chart",
    [
      {
        type: "scatter",
        mode: "lines+markers",
        line: { shape: "hv", color: colour.done, width: 2 },
        marker: { size: 5 },
        x: points.map((one) => new Date(one.at * 1000)),
        y: points.map((one) => one.value),
        text: points.map((one) => names.get(one.job) ?? one.job),
        hovertemplate: "%{text}: %{y:.5g}<extra></extra>",
      },
    ],
    {
      height: 260,
      showlegend: false,
      hovermode: "closest",
      xaxis: { gridcolor: colour.line },
      yaxis: { gridcolor: colour.line, zeroline: false },
    },
  );
  const top = best.at(-1);
  $("best-words").replaceChildren(
    "The best so far is ",
    element("b", number(top.value)),
    ", of ",
    link(names.get(top.job) ?? top.job, jobPage(top.job)),
    `, since ${moment(top.at)}.`,
  );
  $("best-chart").setAttribute(
    "aria-label",
    `Best value so far: ${number(best[0].value)} at first, ${number(top.value)} now`,
  );
}
