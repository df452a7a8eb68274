// The nodes, by cluster if there are several, and what runs on each.
import { $, element, link, smallLine } from "./dom.js";
import { jobPage } from "./api.js";
import { head } from "./clusters.js";
import { moment, number } from "./format.js";

export function showNodes(nodes, clusters) {
  const of = (cluster) => nodes.filter((node) => node.cluster === cluster.name).map((node) => nodeCard(node));
  $("nodes").replaceChildren(
    ...(clusters.length > 1 ? clusters.flatMap((one) => [head(one), ...of(one)]) : nodes.map((node) => nodeCard(node))),
  );
  if (!nodes.length && clusters.length < 2) $("nodes").textContent = "No node has joined yet.";
}

export function nodeCard(node, more = []) {
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
      ...(node.cpus_of_others ? [smallLine(`${number(node.cpus_of_others)} CPUs are reserved by others`)] : []),
      ...(node.suspected ? [element("div", node.suspected, { class: "small warn" })] : []),
      ...(node.cordon && !node.drain ? [element("div", node.cordon.reason, { class: "small warn" })] : []),
      ...(node.drain
        ? [
            element(
              "div",
              node.drain.reason + (node.drain.deadline ? `; it goes away at ${moment(node.drain.deadline)}` : ""),
              { class: "small warn" },
            ),
          ]
        : []),
      ...node.jobs.map((job) =>
        element("div", [link(job.name, jobPage(job.job_id)), ` ${ranks(job)}`], { class: "small" }),
      ),
      ...more,
    ],
    { class: node.alive ? "node" : "node gone", title: node.node_id },
  );
}

const ranks = ({ ranks: known, num_workers: count }) =>
  known.length
    ? `rank${known.length > 1 ? "s" : ""} ${known.slice(0, 12).join(", ")}${known.length > 12 ? " …" : ""}`
    : `${count} starting`;
