// What training reads: samples with the tokens in the loss marked, lengths, labels, and what is left out. Samples are shown as
// text, and images as pictures, never as markup.
import { element, facts, fill, progress, row, table } from "./dom.js";
import { jobPath, request } from "./api.js";
import { joined, percent, plural, whole } from "./format.js";

const TITLES = { train: "Training", validation: "Validation" };

// Resolves to false while nothing is known.
export async function showPreview(id) {
  const { remarks, splits } = await request(`${jobPath(id)}/data`);
  const notes = remarks.map((text) => element("p", text)),
    parts = Object.entries(splits).map(([name, split]) => splitOf(TITLES[name] ?? name, split));
  fill("data-preview", [notes.length ? element("div.notice", notes) : null, parts]);
  return Object.keys(splits).length > 0;
}

function splitOf(title, split) {
  if (!split) return [element("h3", title), element("p.dim", "No samples.")];
  const counts = [
    ["Samples", whole(split.samples)],
    ["Read in each validation", split.validated === null ? "" : whole(split.validated)],
    ["Cut at model.seq_len", split.num_cut ? whole(split.num_cut) : ""],
    ["Tokens of a sample", range(split.tokens)],
    ["Of them in the loss", range(split.in_loss)],
  ];
  const reasons = Object.entries(split.left_out).map(([reason, count]) => element("li", `${reason}: ${whole(count)}`));
  return [
    element("h3", title),
    element("dl.facts", facts(counts.filter(([, value]) => value))),
    reasons.length ? [element("p", "Left out:"), element("ul", reasons)] : null,
    split.num_labels ? labelsOf(split) : null,
    split.num_counted ? element("p.dim.small", lengthsOf(split)) : null,
    ...split.rows.map(sampleOf),
  ];
}

const lengthsOf = (split) =>
  `Lengths are those of the first ${plural(split.num_counted, "sample")}. The first ${whole(split.rows.length)}${split.in_loss[2] ? ", with the tokens in the loss marked" : ""}:`;
const range = ([least, median, most]) =>
  !most ? "" : least === most ? whole(most) : `${whole(least)} to ${whole(most)}, median ${whole(median)}`;

function labelsOf({ labels, num_labels: count }) {
  const rows = Object.entries(labels).map(([name, share]) =>
    row([element("td.text", name), percent(share), progress(share, 1, `Share of ${name}`)]),
  );
  const more = count - rows.length;
  return element("div.wide.labels-read", [
    table("Labels", ["Label", "Share", "Bar"], rows),
    more > 0 ? element("p.dim.small", `and ${plural(more, "rarer label")}`) : null,
  ]);
}

function sampleOf(sample, index) {
  const title = joined([
    `Sample ${index + 1}`,
    sample.tokens ? `${plural(sample.tokens, "token")}, ${whole(sample.in_loss)} in the loss` : "",
    sample.label === null ? "" : `label ${sample.label}`,
  ]);
  const image = sample.png
    ? element("img", null, { src: `data:image/png;base64,${sample.png}`, alt: `Image of sample ${index + 1}` })
    : null;
  return element("figure.media", [
    element("figcaption", title),
    image,
    sample.texts.map((text) => textOf(text, title)),
  ]);
}

function textOf({ title, spans, left_out_chars: more }, sample) {
  const parts = spans.map(([text, counts]) => (counts ? element("mark", text) : text));
  const rest = more ? element("span.dim", ` … ${plural(more, "more character")}`) : null;
  return [
    title ? element("p.dim.small", title) : null,
    element("pre", [parts, rest], { tabindex: "0", "aria-label": joined([sample, title], ": ") }),
  ];
}
