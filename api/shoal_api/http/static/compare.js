// 2 to 10 jobs beside each other: their curves in one chart, their numbers, what differs in their specs, loss parity.
import { $, element, fill, link, onSubmit, rows, said } from "./dom.js";
import { jobPage, jobPath, request } from "./api.js";
import { Live } from "./live.js";
import { grant, number, percent, seconds, steps, unitOf, whole, wordsIn } from "./format.js";
import { badge, ENDED } from "./states.js";
import { curve, DOTTED, followZoom, plot, stacked } from "./plot.js";
import { flat } from "./differences.js";
import { looksOf, onThemeChange } from "./looks.js";
import { keep, keepControls, kept, offer } from "./address.js";
import { columnOf, columnsWithValues, places, smooth, wordsOfColumn } from "./curve_data.js";

const ROWS = new Map([
  ["loss", ["loss", 0.42]],
  ["val_loss", ["validation", 0.2]],
  ["grad_norm", ["gradient norm", 0.14]],
  ["lr", ["learning rate", 0.1]],
  ["tokens_per_s", ["tokens/s", 0.18]],
  ["world_size", ["world size", 0.14]],
]);
const ids = [...new Set(wordsIn(kept("jobs") || ""))];
const SMOOTHED = new Set(["loss", "tokens_per_s"]),
  LOGARITHMIC = new Set(["loss", "val_loss"]);
const found = new Map(); // id -> overview
const judged = new Map(); // id and number of ended jobs -> words of a comparison with the first job
$("ids").value = ids.join(", ");
onSubmit("pick", () => {
  location.search = `?jobs=${wordsIn($("ids").value).join(",")}`;
});
const looks = looksOf(ids);
keepControls(["axis", "smoothing", "log"], (name) => {
  if (name === "axis") keep("zoom", "");
  draw();
});
$("in-workspace").href =
  `/workspace?where=${encodeURIComponent(`id in (${ids.map((id) => JSON.stringify(id)).join(", ")})`)}`;
onThemeChange(draw);

// One stream for all jobs says which of them has changed; only the curves of that job are read again.
const live = new Live({
  async fleet(fleet) {
    const changed = fleet.items.filter(
      (job) => !found.has(job.id) || found.get(job.id).job.updated_at < job.updated_at,
    );
    try {
      await Promise.all(
        changed.map(async ({ id }) => {
          found.set(id, await request(`${jobPath(id)}/overview`));
        }),
      );
    } catch (error) {
      if (error.status) throw error;
      return;
    } // the service is away: its stream sends all jobs again when it is back
    const missing = ids.filter((id) => !found.has(id));
    $("problem").textContent = missing.length ? `There is no job ${missing.join(", ")}.` : "";
    show();
    if (fleet.items.every((job) => ENDED.has(job.state))) {
      live.close();
      $("live").textContent = "ended";
    }
  },
});
if (ids.length >= 2 && ids.length <= 10)
  live.open(`/v1/overview?limit=10&${ids.map((id) => `job=${encodeURIComponent(id)}`).join("&")}`);
else {
  $("result").hidden = $("list").hidden = true;
  $("problem").textContent = ids.length ? `Choose 2 to 10 jobs, not ${ids.length}.` : "";
}

const chosen = () => ids.filter((id) => found.has(id)).map((id) => found.get(id));

function show() {
  rows("jobs", chosen(), ({ job }, index) => {
    const { status } = job,
      parity = element("td", said(index ? "…" : "reference"));
    if (index) judge(job.id, ids[0], parity);
    return [
      element("td.pick", swatch(job)),
      element("td.title", said(link(job.name, jobPage(job.id), { title: job.id }))),
      badge(status.state),
      steps(status),
      number(status.loss),
      number(status.val_loss),
      status.tokens_per_s === null
        ? "–"
        : `${number(status.tokens_per_s)}${unitOf(job) === "tokens" ? "" : " samples/s"}`,
      grant(status),
      status.goodput ? percent(status.goodput.ratio) : "–",
      whole(status.incidents),
      whole(status.steps_lost),
      seconds(job.started_at ? (job.ended_at ?? job.updated_at) - job.started_at : null),
      parity,
    ];
  });
  showSpecs();
  draw();
}

const swatch = ({ id }) => {
  const { colour, dash } = looks.get(id),
    made = element("span.swatch.line", "", { "data-dash": dash });
  made.style.borderColor = colour;
  return made;
};

// Parity reads every step of both jobs, so it is asked for once, and again when a job has ended.
async function judge(id, against, cell) {
  const ended = [id, against].filter((one) => ENDED.has(found.get(one)?.job.status.state)).length,
    key = `${id} ${ended}`;
  if (!judged.has(key))
    judged.set(
      key,
      request(`${jobPath(id)}/parity?against=${encodeURIComponent(against)}`).then(verdict, (error) => error.message),
    );
  cell.firstChild.textContent = await judged.get(key);
}

const verdict = (parity) =>
  !parity.steps_compared
    ? "no step in common"
    : parity.bit_identical
      ? `the same bits in ${whole(parity.steps_compared)} steps`
      : !parity.within_tolerance && !parity.steps_over_tolerance
        ? `equal in ${whole(parity.steps_compared)} steps, and ${whole(parity.steps_only_in_job + parity.steps_only_in_against)} only one has`
        : `${parity.within_tolerance ? "parity" : "different"}: by ${number(parity.max_rel_diff, 2)} at most, in ${whole(parity.steps_compared)} steps`;

function showSpecs() {
  const all = chosen(),
    flats = all.map(({ job }) => flat(job.spec));
  const paths = [...new Set(flats.flatMap(Object.keys))]
    .sort()
    .filter((path) => path !== "name" && new Set(flats.map((one) => one[path])).size > 1);
  fill("spec-heads", [
    element("th", "Key", { scope: "col" }),
    ...all.map(({ job }) => element("th", [swatch(job), job.name], { scope: "col" })),
  ]);
  rows("specs", paths, (path) => [
    element("td.title", element("code", said(path, "long"))),
    ...flats.map((one) => said(one[path] ?? "–")),
  ]);
  $("equal").hidden = paths.length > 0 || all.length < 2;
}

function draw() {
  const all = chosen(),
    axis = $("axis").value,
    weight = Number($("smoothing").value);
  if (!all.length) return;
  const names = new Set(all.flatMap(({ series }) => columnsWithValues(series, [...ROWS.keys()])));
  offer($("axis"), [...names], wordsOfColumn);
  const rows = [...new Set([...ROWS.keys(), ...[...names].sort()])]
    .filter((name) => names.has(name)) // no panel without data
    .map((name) => [name, ...(ROWS.get(name) ?? [wordsOfColumn(name), 0.14])]);
  const traces = all.flatMap(({ job, series }) => {
    const perStep = job.status.step ? job.status.tokens / job.status.step : 1,
      start = job.started_at ?? job.created_at;
    const x = axis === "time" ? series.at.map((at) => at - start) : places(axis, series, perStep);
    const { colour, dash } = looks.get(job.id);
    return rows.map(([name, title], row) => {
      const y = columnOf(series, name);
      return curve(row, `${job.name} ${title}`, x, SMOOTHED.has(name) ? smooth(y, weight) : y, colour, {
        ...(name === "val_loss" ? DOTTED : { connectgaps: true }),
        line: { dash, shape: name === "world_size" ? "hv" : "linear" },
      });
    });
  });
  const titled = rows.map(([name, title, share]) => [
    title,
    share,
    { type: $("log").checked && LOGARITHMIC.has(name) ? "log" : "linear" },
  ]);
  const title = { text: axis === "time" ? "seconds since the start" : wordsOfColumn(axis) };
  plot("chart", traces, stacked(titled, { title }, 760, { uirevision: axis })).then((chart) =>
    followZoom(chart, () => {}),
  );
}
