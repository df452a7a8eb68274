// The choice of a cluster among the filters of the page of all jobs.
import { $ } from "./dom.js";

// It is shown once there are several.
export function showFilter(clusters, chosen) {
  const names = ["", ...clusters.map((one) => one.name)],
    select = $("cluster-filter");
  $("of-cluster").hidden = clusters.length < 2 && !chosen;
  if (chosen && !names.includes(chosen)) names.push(chosen);
  if (select.dataset.names !== names.join())
    select.replaceChildren(...names.map((name) => new Option(name || "all", name)));
  select.dataset.names = names.join();
  select.value = chosen;
}
