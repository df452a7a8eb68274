// Goodput by project: where the worker-seconds of the chosen time went, by cause, as a whole and over time.
import { $, element, fill, row, said, svg } from "./dom.js";
import { brief, percent, seconds, words } from "./format.js";
import { CATEGORIES, key, stripe } from "./stripe.js";

const WIDTH = 1000,
  HEIGHT = 60;

export function showSpent({ projects, edges }) {
  const spent = projects.filter((one) => one.total > 0);
  $("spent-words").textContent = spent.length
    ? `${brief(edges[0])} to ${brief(edges.at(-1))}, of jobs that have started. A bar is ${seconds(edges[1] - edges[0])}; all have the same scale.`
    : "No job that has started wanted workers in this time.";
  fill(
    "causes",
    CATEGORIES.filter((name) => spent.some((one) => one.seconds[name])).map((name) => key(name)),
  );
  const most = Math.max(1e-9, ...spent.flatMap((one) => sums(one, edges)));
  fill(
    "spent",
    spent.map((one) =>
      row(
        [
          element("td", said(one.project), { class: "title" }),
          percent((one.seconds.productive ?? 0) / one.total),
          seconds(one.total - (one.seconds.queued ?? 0)),
          element(
            "td",
            [
              stripe(parts(one), 300, 16, `Worker time of ${one.project} by cause`),
              element("div", listed(one), { class: "small dim" }),
            ],
            { class: "text" },
          ),
          element("td", bars(one, edges, most), { class: "text" }),
        ],
        { "data-project": one.project },
      ),
    ),
  );
}

const parts = (one) => CATEGORIES.map((name) => [name, one.seconds[name] ?? 0]).filter(([, amount]) => amount > 0);
const sums = (one, edges) =>
  edges.slice(1).map((_, index) => Object.values(one.by_interval).reduce((sum, amounts) => sum + amounts[index], 0));

// "productive 82 %, queued 12 %, recovering 2 % (node died 1.2 min)".
function listed(one) {
  const causes = Object.entries(one.recovering)
    .sort((a, b) => b[1] - a[1])
    .map(([cause, amount]) => `${words(cause)} ${seconds(amount)}`)
    .join(", ");
  return parts(one)
    .sort((a, b) => b[1] - a[1])
    .map(
      ([name, amount]) =>
        `${words(name)} ${percent(amount / one.total)}${name === "recovering" && causes ? ` (${causes})` : ""}`,
    )
    .join(", ");
}

function bars(one, edges, most) {
  const wide = WIDTH / (edges.length - 1),
    shapes = [];
  edges.slice(1).forEach((end, index) => {
    let below = HEIGHT;
    for (const name of CATEGORIES) {
      const amount = one.by_interval[name]?.[index] ?? 0,
        height = (amount / most) * HEIGHT;
      if (!amount) continue;
      below -= height;
      shapes.push(
        svg("rect", { x: index * wide, y: below, width: wide * 0.9, height, class: name }, [
          svg("title", {}, [`${brief(edges[index])} to ${brief(end)}: ${words(name)} ${seconds(amount)}`]),
        ]),
      );
    }
  });
  return svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      class: "lane tall",
      role: "img",
      "aria-label": `Worker time of ${one.project} over time; goodput ${percent((one.seconds.productive ?? 0) / one.total)}`,
    },
    shapes,
  );
}
