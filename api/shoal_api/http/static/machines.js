// The page of the fleet: nodes and their maintenance, workers over time with the decisions, the queue, the projects. The
// stream of the overview says when something has changed; the rest is read then, but not more often than every three seconds.
import { $, element, fill, link, row, said } from "./dom.js";
import { jobPage, request } from "./api.js";
import { ask } from "./dialog.js";
import { Live } from "./live.js";
import { head } from "./clusters.js";
import { moment, number, percent, seconds, whole, words } from "./format.js";
import { nodeCard } from "./nodes.js";
import { showTimeline } from "./timeline.js";

const READ_MS = 3000;
let may = new Set(), shown = null, timer = null, readAt = 0;
$("hours").addEventListener("input", read);
$("plan").addEventListener("click", planWindow);

const live = new Live({ fleet(fleet) { shown = fleet; showNodes(); soon(); } });
request("/v1/whoami").then((me) => { may = new Set(me.permissions); if (shown) showNodes(); read(); });
live.open("/v1/overview?limit=1");

function soon() {
  if (timer) return;
  timer = setTimeout(() => { timer = null; read(); }, Math.max(0, readAt + READ_MS - Date.now()));
}

async function read() {
  readAt = Date.now();
  let found;
  try { found = await Promise.all([request(`/v1/timeline?hours=${$("hours").value}`), request("/v1/queue"), may.has("cluster:read") ? request("/v1/maintenance-windows") : null]); }
  catch (error) { if (error.status) throw error; soon(); return; }  // without a status the service is away, as the header says
  const [timeline, queue, windows] = found;
  showTimeline(timeline);
  $("no-queue").hidden = queue.items.length > 0;
  fill("queue", queue.items.map((job) => row([whole(job.place?.position), element("td", said(link(job.name, jobPage(job.job_id))), { class: "title" }), job.project, whole(job.priority), element("td", job.place?.reason ?? "The scheduler has not considered it yet.", { class: "text" })])));
  showProjects(queue.projects, timeline.projects);
  $("of-windows").hidden = !windows;
  $("plan").hidden = !may.has("cluster:change");
  if (windows) fill("windows", windows.items.map((one) => row([said(one.nodes.join(", ")), moment(one.begins_at), moment(one.ends_at), moment(one.drains_at), element("td", one.reason, { class: "text" }),
    element("td", may.has("cluster:change") ? element("button", "Cancel", { type: "button", "aria-label": `Cancel the window ${one.reason}`, click: () => change(`Cancel the window`, "Cancel it", "Its nodes are used again, and no node drains for it.", () => request(`/v1/maintenance-windows/${one.window_id}`, { method: "DELETE" })) }) : "", { class: "title" })])));
}

function showProjects(quotas, booked) {
  const names = [...new Set([...quotas, ...booked.map((one) => ({ name: one.project }))].map((one) => one.name))].sort();
  const present = new Set(booked.flatMap((one) => Object.keys(one.seconds)));
  fill("causes", [...present].map((cause) => element("li", [element("span", "", { class: `swatch ${cause}` }), words(cause)])));
  fill("projects", names.map((name) => {
    const quota = quotas.find((one) => one.name === name) ?? {}, spent = booked.find((one) => one.project === name) ?? { seconds: {}, total: 0 };
    return row([element("td", said(name), { class: "title" }), whole(quota.workers), quota.is_defined ? whole(quota.guaranteed) : "–", whole(quota.limit), quota.is_defined ? number(quota.weight) : "–", whole(quota.running), whole(quota.queued),
      spent.total ? percent((spent.seconds.productive ?? 0) / spent.total) : "–", element("td", spent.total ? causes(spent) : "–", { class: "text" })]);
  }));
}

function causes({ seconds: spent, total }) {
  const parts = Object.entries(spent).map(([cause, amount]) => { const made = element("span", "", { class: cause, title: `${words(cause)}: ${seconds(amount)}` }); made.style.cssText = `background: var(--part); width: ${100 * amount / total}%`; return made; });
  return element("div", parts, { class: "stripe", role: "img", "aria-label": Object.entries(spent).map(([cause, amount]) => `${words(cause)} ${percent(amount / total)}`).join(", ") });
}

function showNodes() {
  const { nodes, clusters } = shown, several = clusters.length > 1;
  const made = (node) => nodeCard(node, node.alive && may.has("cluster:change") ? [element("div", buttons(node), { class: "controls" })] : []);
  fill("nodes", several ? clusters.flatMap((one) => [head(one), ...nodes.filter((node) => node.cluster === one.name).map(made)]) : nodes.map(made));
  if (!nodes.length) $("nodes").textContent = "No node has joined yet.";
}

function buttons(node) {
  const name = node.ip || node.node_id.slice(0, 8), path = `/v1/nodes/${node.node_id}`;
  const button = (title, looks, press) => element("button", title, { type: "button", class: looks, "aria-label": `${title} ${name}`, click: press });
  const reason = () => element("label", ["Reason ", element("input", null, { id: "dialog-value", size: 30, value: "maintenance" })]);
  const runs = node.num_workers ? `${node.num_workers} of its workers` : "No worker is there, and its workers";
  return [
    node.cordon ? button("Uncordon", "", () => change(`Uncordon ${name}`, "Uncordon", "New workers are placed there again.", () => request(`${path}/cordon`, { method: "DELETE" })))
      : button("Cordon", "", () => change(`Cordon ${name}`, "Cordon", "No new worker is placed there. Those that are there stay.", (value) => request(`${path}/cordon`, { method: "POST", body: { reason: value } }), [reason()])),
    node.drain ? button("Undo drain", "", () => change(`Use ${name} again`, "Use it", "New workers are placed there again.", () => request(`${path}/drain`, { method: "DELETE" })))
      : button("Drain", "danger", () => change(`Drain ${name}`, "Drain", `${runs} leave it at their next step boundary and lose no step. No new worker is placed there.`, (value) => request(`${path}/drain`, { method: "POST", body: { reason: value } }), [reason()]))];
}

function change(title, confirm, said, send, input = []) {
  ask({ title, confirm, input, words: async () => said, send: async (value) => { await send(value); await read(); } });
}

function planWindow() {
  const field = (title, id, attributes) => element("p", [element("label", [title, element("input", null, { id, ...attributes })])], { class: "controls" });
  const names = shown?.nodes.filter((node) => node.alive).map((node) => node.ip || node.node_id) ?? [];
  change("Plan a maintenance window", "Plan it", "The nodes are empty when it begins: they drain as early as recent drains took twice. They are used again when it ends.", (reason) => {
    const at = (id) => { const time = new Date($(id).value); if (Number.isNaN(time.getTime())) throw new Error("Say when it begins and when it ends."); return time.getTime() / 1000; };
    const nodes = $("window-nodes").value.split(/[\s,]+/).filter(Boolean);
    if (!nodes.length) throw new Error("Name the nodes by address or id.");
    return request("/v1/maintenance-windows", { method: "POST", body: { nodes, begins_at: at("window-begins"), ends_at: at("window-ends"), reason } });
  }, [field("Nodes ", "window-nodes", { size: 34, value: names.length === 1 ? names[0] : "", placeholder: "addresses or ids" }), field("Begins ", "window-begins", { type: "datetime-local" }), field("Ends ", "window-ends", { type: "datetime-local" }), field("Reason ", "dialog-value", { size: 30, value: "maintenance" })]);
}
