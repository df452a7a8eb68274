// The nodes, and what runs on each; by cluster, if several have joined. A page with one cluster says nothing about it.
import { $, element, fill, link, small, smallLine } from "./dom.js";
import { jobPage } from "./api.js";
import { moment, number, pairs, plural, seconds } from "./format.js";

// more(node): what stands below a node, such as buttons.
export function showNodes(nodes, clusters, more = () => null) {
  const cards = (some) => some.map((node) => nodeCard(node, more(node))),
    inside = (cluster) => nodes.filter((node) => node.cluster === cluster.name);
  const several = clusters.length > 1;
  fill("nodes", several ? clusters.map((one) => [headOf(one), cards(inside(one))]) : cards(nodes));
  if (!nodes.length && !several) $("nodes").textContent = "No node has joined yet.";
}

function nodeCard(node, more) {
  const state = !node.alive
    ? ["dead", "bad"]
    : node.drain
      ? [node.num_workers ? "draining" : "drained", "warn"]
      : node.on_probation
        ? ["on probation", "warn"]
        : node.cordon
          ? ["cordoned", "warn"]
          : ["alive", "done"];
  const resources = [
    `${number(node.cpus)} CPUs`,
    ...(node.gpus ? [`${number(node.gpus)} GPUs`] : []),
    `${number(node.memory_gib, 3)} GiB`,
  ];
  return element(
    "div",
    [
      element("b", node.ip || node.node_id.slice(0, 8)),
      " ",
      element("span", state[0], { class: `small ${state[1]}` }),
      smallLine(resources.join(", ")),
      node.cpus_of_others ? smallLine(`${number(node.cpus_of_others)} CPUs are reserved by others`) : null,
      node.suspected ? element("div.small.warn", node.suspected) : null,
      node.cordon && !node.drain ? element("div.small.warn", node.cordon.reason) : null,
      node.drain
        ? element(
            "div.small.warn",
            node.drain.reason + (node.drain.deadline ? `; it goes away at ${moment(node.drain.deadline)}` : ""),
          )
        : null,
      ...node.jobs.map((job) => element("div.small", [link(job.name, jobPage(job.job_id)), ` ${ranks(job)}`])),
      more,
    ],
    { class: node.alive ? "node" : "node gone", title: node.node_id },
  );
}

const ranks = ({ ranks: known, num_workers: count }) =>
  known.length
    ? `rank${known.length > 1 ? "s" : ""} ${known.slice(0, 12).join(", ")}${known.length > 12 ? " …" : ""}`
    : `${count} starting`;

// The head over the nodes of a cluster.
function headOf(cluster) {
  const labels = pairs(cluster.labels);
  return element(
    "div.cluster",
    [
      element("b", cluster.name),
      " ",
      element("span", about(cluster), { class: `small ${cluster.connected ? "dim" : "bad"}` }),
      labels ? [" ", small(labels)] : null,
      cluster.cordon ? element("div.small.warn", `cordoned: ${cluster.cordon.reason}`) : null,
    ],
    { "data-cluster": cluster.name },
  );
}

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
