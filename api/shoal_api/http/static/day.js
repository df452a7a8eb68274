// The goodput of the cluster over the last day.
import { $, svg } from "./dom.js";
import { moment, percent, seconds } from "./format.js";

// One column for each ten minutes: the coloured part was productive.
export function showDay(bins) {
  const last = bins.length ? bins[bins.length - 1].at : 0;
  $("goodput").replaceChildren(
    ...bins.map((bin) => {
      const share = bin.total ? bin.productive / bin.total : 0;
      const shape = svg("rect", {
        x: 143 - (last - bin.at) / 600,
        y: 10 - 10 * share,
        width: 1.02,
        height: 10 * share,
        class: "productive",
      });
      const title = svg("title", {});
      title.textContent = `${moment(bin.at)}: ${percent(share)} of ${seconds(bin.total)}`;
      shape.append(title);
      return shape;
    }),
  );
}
