// What a version comes from, as a drawing: for each job of its chain, the oldest first, code, data and spec at the left, the job
// and the checkpoint that the next one began with at the right; at the end the version. Each box leads to its page.
//
//   code ─┐
//   data ─┼─ job              its page            code, data, spec: its tab Spec
//   spec ─┘   │
//         checkpoint          the row of the job's tab Checkpoints
//             │
//   code ─┐   │
//         ...job ...
//             │
//   export ─ speech@3         how to read it, below on the page
import { svg } from "./dom.js";
import { jobPage, modelPage, stepPage } from "./api.js";
import { whole } from "./format.js";

const WIDTH = 360,
  LEFT = 138,
  RIGHT = 176,
  SMALL = 36,
  TALL = 48,
  GAP = 8,
  STEP = 26;
const BLOCK = 3 * SMALL + 2 * GAP,
  MIDDLE = RIGHT + (WIDTH - RIGHT) / 2;

export function lineageGraph(version) {
  const chain = [...version.lineage].reverse(),
    parts = [],
    boxes = [];
  let y = 1,
    above = null; // the lower end of the last box of the chain
  const right = (box) => {
    if (above !== null) parts.push(...down(above, y));
    boxes.push(draw({ x: RIGHT, y, width: WIDTH - RIGHT - 1, height: TALL, ...box }));
    above = y + TALL;
  };
  const first = chain[0];
  if (first?.is_known && !first.parent) right({ kind: "begins with", words: "its seed", href: specPage(first) });
  else if (first?.is_known && first.parent.job_id)
    right({ kind: "job, not shown here", words: first.parent.job_id, href: jobPage(first.parent.job_id) });
  else if (first?.is_known) right({ kind: "weights", words: first.parent.url, href: specPage(first) });
  if (above !== null) y += TALL + STEP;
  chain.forEach((job, at) => {
    const next = chain[at + 1]?.parent,
      last = at === chain.length - 1;
    if (job.is_known) {
      const inputs = [
        ["code", job.code.split(":").at(-1) || "–", job.code_sha256],
        ["data", job.data_source || "of its task", job.data],
        ["spec", `version ${job.spec_version}`, job.spec_sha256],
      ];
      inputs.forEach(([kind, words, hash], row) => {
        const top = y + row * (SMALL + GAP);
        boxes.push(
          draw({
            x: 1,
            y: top,
            width: LEFT,
            height: SMALL,
            kind: hash ? `${kind} ${hash.slice(0, 12)}` : kind,
            words,
            more: hash,
            href: specPage(job),
          }),
        );
        parts.push(across(LEFT + 1, top + SMALL / 2, y + TALL / 2));
      });
    }
    right({
      kind: job.is_known ? "job" : "job, deleted or not visible",
      words: job.is_known ? job.name || job.job_id : job.job_id,
      more: job.job_id,
      href: job.is_known ? jobPage(job.job_id) : null,
    });
    y += job.is_known ? BLOCK - TALL : TALL + STEP;
    const step = last ? version.step : next?.step;
    right({
      kind: "checkpoint",
      words: Number.isInteger(step) ? `step ${whole(step)}` : "its newest",
      more: last ? version.url : next?.url,
      href: job.is_known ? stepPage(job.job_id, step) : null,
    });
    y += TALL + STEP;
  });
  right({
    kind: version.aliases.length ? `model, ${version.aliases.join(", ")}` : "model",
    words: `${version.name}@${version.version}`,
    href: modelPage(version),
    look: "chosen",
  });
  boxes.push(
    draw({
      x: 1,
      y: y + (TALL - SMALL) / 2,
      width: LEFT,
      height: SMALL,
      kind: "export",
      words: "safetensors",
      more: `shoal model get ${version.name}@${version.version} --to DIR`,
      href: "#get",
    }),
  );
  parts.push(across(LEFT + 1, y + TALL / 2, y + TALL / 2, true));
  return svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${y + TALL + 1}`,
      class: "graph",
      role: "group",
      "aria-label": `Lineage of ${version.name}@${version.version}, the oldest job first`,
    },
    [...parts, ...boxes],
  );
}

const specPage = (job) => `${jobPage(job.job_id)}#tab=spec`;
const clipped = (text, width) => {
  const most = Math.floor((width - 16) / 6.9);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
};

// A box with its kind above its words; a link, unless it has no page.
function draw({ x, y, width, height, kind, words, more, href, look = "" }) {
  const title = [`${kind}: ${words}`, more].filter(Boolean).join("\n");
  const inner = [
    svg("title", {}, [title]),
    svg("rect", { x, y, width, height, rx: 5 }),
    svg("text", { x: x + 8, y: y + height / 2 - 5, class: "kind" }, [clipped(kind, width * 1.12)]),
    svg("text", { x: x + 8, y: y + height / 2 + 11 }, [clipped(words, width)]),
  ];
  return href
    ? svg("a", { href, class: look, "aria-label": title.replace("\n", ", ") }, inner)
    : svg("g", { class: `gone ${look}` }, inner);
}

const arrow = (x, y, ...turned) =>
  svg("polygon", {
    points: turned.length
      ? `${x},${y} ${x - 4},${y - 6} ${x + 4},${y - 6}`
      : `${x},${y} ${x - 6},${y - 4} ${x - 6},${y + 4}`,
  });
const down = (from, to) => [svg("path", { d: `M${MIDDLE} ${from}V${to - 5}` }), arrow(MIDDLE, to, true)];
// From a box at the left to the box of the chain, or back.
function across(x, from, to, back = false) {
  const path = svg("path", { d: `M${x} ${from}C${x + 20} ${from} ${RIGHT - 24} ${to} ${RIGHT - 5} ${to}` });
  return svg("g", {}, [
    path,
    back ? svg("polygon", { points: `${x},${from} ${x + 6},${from - 4} ${x + 6},${from + 4}` }) : arrow(RIGHT, to),
  ]);
}
