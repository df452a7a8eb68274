// The curves of all jobs of a sweep over each other, the best value so far, and how much each parameter matters. The service
// bounds the number of points. Curves of a kind are one trace, so that two hundred jobs are drawn at once.
import { $, element, fill, link } from "./dom.js";
import { jobPage } from "./api.js";
import { moment, number, plural } from "./format.js";
import { curve, grid, markers, plot } from "./plot.js";
import { colours, looksOf, PALETTE } from "./looks.js";

const HIGHLIGHTED = 3,
  NAMED = { hovertemplate: "%{text}: %{y:.5g}<extra></extra>" };

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
        [...looksOf(known.map(({ id }) => id))].map(([id, { colour, dash }]) => [
          byId.get(id).name,
          [colour, 1.8, dash],
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
    .map(([kind, { x, y, text }]) => {
      const [color, width, dash] = kinds[kind];
      return curve(0, kind, x, y, color, {
        text,
        line: { width, dash },
        opacity: kind === "others" ? 0.6 : 1,
        ...NAMED,
      });
    });
  const ended = known.filter((one) => byId.get(one.id).reason === "pruned");
  if (ended.length)
    traces.push(
      markers(
        0,
        "pruned here",
        ended.map((one) => (axis === "time" ? one.at.at(-1) - begin : one.step.at(-1))),
        ended.map((one) => one.value.at(-1)),
        { symbol: "x", size: 7, color: colour.bad },
        NAMED.hovertemplate,
        { text: ended.map((one) => `${byId.get(one.id).name} was pruned`) },
      ),
    );
  plot("curves-chart", traces, {
    height: 380,
    hovermode: "closest",
    showlegend: true,
    legend: { orientation: "h", y: 1.12 },
    xaxis: { ...grid(), title: { text: axis === "time" ? "seconds since the first step" : "step" } },
    yaxis: { ...grid(), type: $("log").checked ? "log" : "linear" },
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
  const steps = curve(
    0,
    "best so far",
    points.map((one) => new Date(one.at * 1000)),
    points.map((one) => one.value),
    colour.done,
    { mode: "lines+markers", line: { shape: "hv", width: 2 }, marker: { size: 5 }, ...NAMED },
  );
  steps.text = points.map((one) => names.get(one.job) ?? one.job);
  plot("best-chart", [steps], { height: 260, hovermode: "closest", xaxis: grid(), yaxis: grid() });
  const top = best.at(-1);
  fill("best-words", [
    "The best so far is ",
    element("b", number(top.value)),
    ", of ",
    link(names.get(top.job) ?? top.job, jobPage(top.job)),
    `, since ${moment(top.at)}.`,
  ]);
  $("best-chart").setAttribute(
    "aria-label",
    `Best value so far: ${number(best[0].value)} at first, ${number(top.value)} now`,
  );
}
