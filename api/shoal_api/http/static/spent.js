// Goodput by project: where the worker-seconds of the chosen time went, by cause, as a whole and over time.
import { $, bar, element, fillEach, picture, rows, said, smallLine } from "./dom.js";
import { brief, percent, seconds, words } from "./format.js";
import { CATEGORIES, causesOf, key, stripe } from "./stripe.js";

const WIDTH = 1000,
  HEIGHT = 60;

export function showSpent({ projects, edges }) {
  const spent = projects.filter((one) => used(one) > 0);
  $("spent-words").textContent = spent.length
    ? `${brief(edges[0])} to ${brief(edges.at(-1))}, of jobs that have started. A bar is ${seconds(edges[1] - edges[0])}; all have the same scale.`
    : "No job that has started wanted workers in this time.";
  fillEach(
    "causes",
    USES.filter((name) => spent.some((one) => one.seconds[name])),
    (name) => key(name),
  );
  const most = Math.max(1e-9, ...spent.flatMap((one) => sums(one, edges)));
  rows("spent", spent, (one) => [
    element("td.title", said(one.project)),
    percent((one.seconds.productive ?? 0) / one.total),
    seconds(used(one)),
    element("td.text", [stripe(parts(one), 300, 16, `Worker time of ${one.project} by cause`), smallLine(listed(one))]),
    element("td.text", bars(one, edges, most)),
    { "data-project": one.project },
  ]);
}

// Time in the queue is no use: it is said beside it.
const USES = CATEGORIES.filter((name) => name !== "queued");
const used = (one) => one.total - (one.seconds.queued ?? 0);
const parts = (one) => USES.map((name) => [name, one.seconds[name] ?? 0]).filter(([, amount]) => amount > 0);
const sums = (one, edges) =>
  edges.slice(1).map((_, index) => USES.reduce((sum, name) => sum + (one.by_interval[name]?.[index] ?? 0), 0));

// "productive 82 %, recovering 2 % (node died 1.2 min); queued 12 min".
function listed(one) {
  const causes = causesOf(one);
  const shares = parts(one)
    .sort((a, b) => b[1] - a[1])
    .map(
      ([name, amount]) =>
        `${words(name)} ${percent(amount / used(one))}${name === "recovering" && causes ? ` (${causes})` : ""}`,
    );
  return shares.join(", ") + (one.seconds.queued ? `; queued ${seconds(one.seconds.queued)}` : "");
}

function bars(one, edges, most) {
  const wide = WIDTH / (edges.length - 1),
    shapes = [];
  edges.slice(1).forEach((end, index) => {
    let below = HEIGHT;
    for (const name of USES) {
      const amount = one.by_interval[name]?.[index] ?? 0,
        height = (amount / most) * HEIGHT;
      if (!amount) continue;
      below -= height;
      const title = `${brief(edges[index])} to ${brief(end)}: ${words(name)} ${seconds(amount)}`;
      shapes.push(bar(title, index * wide, below, wide * 0.9, height, { class: name }));
    }
  });
  const label = `Worker time of ${one.project} over time; goodput ${percent((one.seconds.productive ?? 0) / one.total)}`;
  return picture(WIDTH, HEIGHT, label, shapes, { class: "lane tall" });
}
