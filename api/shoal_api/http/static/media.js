// What a job has logged besides numbers: a slider over its steps, images, histograms over the steps, tables and texts; and
// what its checkpoints come from. All of it is shown as text or as an image, never as markup.
import { $, element, fill, fillEach, link, row, table } from "./dom.js";
import { jobPath, modelPage, request } from "./api.js";
import { joined, plural, seconds, whole } from "./format.js";
import { drawn } from "./histograms.js";
import { fillLineage } from "./lineage.js";

const MOST_RECORDS = 100;
let job = null,
  steps = [],
  recent = [],
  history = [],
  asked = 0;

export async function showMedia(id) {
  job = id;
  const page = await request(`${jobPath(id)}/media?limit=${MOST_RECORDS}`);
  const atEnd = !steps.length || Number($("media-step").value) >= steps.length - 1;
  steps = page.steps;
  recent = page.items;
  const isAll = page.num_records <= MOST_RECORDS || !recent.some((one) => one.histograms.length);
  history = isAll ? recent : (await request(`${jobPath(id)}/media?spread=true&limit=${MOST_RECORDS}`)).items;
  $("media-card").hidden = !steps.length;
  $("unlogged").hidden = Boolean(steps.length);
  if (!steps.length) return;
  const slider = $("media-step");
  slider.max = steps.length - 1;
  if (atEnd) slider.value = slider.max;
  slider.oninput = $("media-view").onchange = showStep;
  await showStep();
}

async function showStep() {
  const turn = ++asked,
    step = steps[Number($("media-step").value)];
  $("media-at").textContent =
    `step ${whole(step)}, ${whole(Number($("media-step").value) + 1)} of ${whole(steps.length)}`;
  $("media-step").setAttribute("aria-valuetext", `step ${step}`);
  const known = recent.filter((one) => one.step === step);
  const items = known.length ? known : (await request(`${jobPath(job)}/media?step=${step}`)).items;
  if (turn !== asked) return;
  $("media-view").parentElement.hidden = !items.some((one) => one.histograms.length);
  fillEach("media-images", items, (one) => one.images.map((image) => picture(one, image)));
  fillEach("media-histograms", items, (one) => one.histograms.map((found) => histogram(one, found)));
  fillEach("media-tables", items, (one) => one.tables.map((found) => logged(one, found)));
  fillEach("media-texts", items, (one) =>
    one.texts.map((found) =>
      element("figure", [
        element("figcaption", titled(one, found.name, cut(found.text.length, found.num_chars, "characters"))),
        element("pre", found.text),
      ]),
    ),
  );
  const dropped = recent.reduce((sum, one) => sum + one.dropped, 0);
  const held = Math.max(...recent.map((one) => one.held_s));
  $("media-notes").textContent = joined(
    [
      ...items.flatMap((one) => one.notes),
      dropped ? `${plural(dropped, "call")} dropped, because the storage was too slow` : "",
      Number.isFinite(held) ? `a call kept the training thread for ${seconds(held)} at most` : "",
    ],
    "; ",
  );
}

const titled = (one, name, more) => joined([name, one.rank ? `rank ${one.rank}` : "", more]);

const cut = (shown, all, what) => (all > shown ? `the first ${whole(shown)} of ${whole(all)} ${what}` : "");

function picture(one, image) {
  const title = titled(one, image.name, image.note);
  const href = `${jobPath(job)}/media/${encodeURIComponent(image.file)}`;
  return element("figure", [
    link(element("img", null, { src: href, alt: `${image.name} at step ${one.step}`, loading: "lazy" }), href),
    element("figcaption", title),
  ]);
}

// The steps up to the chosen one; of a long run evenly spaced ones.
function histogram(one, newest) {
  const before = history
    .filter((other) => other.rank === one.rank && other.step < one.step)
    .flatMap((other) =>
      other.histograms
        .filter((found) => found.name === newest.name && found.counts.length)
        .map((found) => [other.step, found]),
    );
  const words = `${newest.name}: ${number(newest.low)} to ${number(newest.high)}, mean ${number(newest.mean)}, standard deviation ${number(newest.std)}, ${whole(newest.num_values)} values`;
  const [image, shown] = drawn($("media-view").value, [...before, [one.step, newest]], words);
  const more = joined([
    newest.num_sampled < newest.num_values ? `a sample of ${whole(newest.num_sampled)}` : "",
    newest.num_not_finite ? `${whole(newest.num_not_finite)} not finite` : "",
    shown.length > 1 ? `steps ${whole(shown[0].step)} to ${whole(shown.at(-1).step)}` : "",
  ]);
  return element("figure", [image, element("figcaption", titled(one, words, more))]);
}

const number = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));

function logged(one, found) {
  const rows = found.rows.map((cells) => row(cells.map((cell) => (cell === null ? "–" : String(cell)))));
  return element("figure", [
    element("figcaption", titled(one, found.name, cut(found.rows.length, found.num_rows, "rows"))),
    element("div.wide", table(found.name, found.columns, rows)),
  ]);
}

export async function showLineage(id) {
  const view = await request(`${jobPath(id)}/lineage`);
  fillLineage(view.jobs.length > 1 ? view.jobs : []); // a job that has begun with its seed is no line of its own
  const models = view.registered.flatMap((one, index) => [
    index ? "; " : "",
    link(`${one.name}@${one.version}${one.aliases.length ? ` (${one.aliases.join(", ")})` : ""}`, modelPage(one)),
    ` is step ${whole(one.step)}`,
  ]);
  fill("registered", [
    ...(models.length
      ? ["Registered: ", ...models, "."]
      : [
          "No checkpoint of this job is registered as a model yet: the button Register, or shoal model register JOB --name NAME.",
        ]),
  ]);
}
