// The clusters that have joined. A page with one cluster says nothing about it.
import { element, small } from "./dom.js";
import { number, plural, seconds } from "./format.js";

// "4 of 16 CPUs free" of all these clusters.
export function free(clusters) {
  const sum = (key) => clusters.reduce((all, one) => all + one[key], 0);
  const gpus = sum("gpus_total") ? `, ${number(sum("gpus_free"))} of ${number(sum("gpus_total"))} GPUs free` : "";
  return `${number(sum("cpus_free"))} of ${number(sum("cpus_total"))} CPUs free${gpus}`;
}

// "4 of 16 CPUs free, 2 jobs", or why it is away.
export function about(cluster) {
  const silent = cluster.silent_s === null ? "" : `, silent for ${seconds(cluster.silent_s)}`;
  if (!cluster.connected) return `away: ${cluster.why_away}${silent}`;
  return `${free([cluster])}, ${plural(cluster.num_jobs, "job")}`;
}

// The head over the nodes of a cluster.
export function head(cluster) {
  const labels = Object.entries(cluster.labels)
    .map(([key, value]) => `${key}=${value}`)
    .join(" ");
  return element(
    "div",
    [
      element("b", cluster.name),
      " ",
      element("span", about(cluster), { class: `small ${cluster.connected ? "dim" : "bad"}` }),
      ...(labels ? [" ", small(labels)] : []),
      ...(cluster.cordon ? [element("div", `cordoned: ${cluster.cordon.reason}`, { class: "small warn" })] : []),
    ],
    { class: "cluster", "data-cluster": cluster.name },
  );
}
