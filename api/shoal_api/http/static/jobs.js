// The live page of jobs. It only reads. It writes data of the service with textContent, never as markup.
"use strict";
const $ = (id) => document.getElementById(id);
const MOOD = { RUNNING: "good", SUCCEEDED: "good", FAILED: "bad", CANCELLED: "dim", QUEUED: "dim", PAUSED: "warn",
  RECOVERING: "warn", WAITING: "warn" };
const clock = (at) => new Date(at * 1000).toLocaleString();
const steps = (job) => number(job.step, 15) + (job.total_steps ? ` / ${number(job.total_steps, 15)}` : "");

const tag = (state, position) => element("span", position ? `${state} #${position}` : state, `tag ${MOOD[state] || "busy"}`);
const starts = ({ expected_at: at }) => at === null ? "not known" : clock(at);
// Of a queued job; why it waits is its message.
const place = (queue) => !queue ? [] : [["Position in the queue", queue.position], ["Expected start", starts(queue)],
  ["Who holds what it waits for", queue.holders.join(", ") || "–"]];
function fill(body, rows) {
  body.replaceChildren(...rows.map((cells) => { const row = element("tr"); row.append(...cells.map((c) => element("td", c))); return row; }));
}

const SEVERITY = { info: "", success: "good", warning: "warn", error: "bad" };
const MAX_EVENTS = 100;
let chosen = null, stream = null, refreshing = false, again = false, events = [], eventSeq = 0;

function showJobs(page) {
  $("none").hidden = page.items.length > 0;
  fill($("jobs"), page.items.map((job) => [element("code", job.id), job.name, job.project, job.priority, tag(job.state, job.queue_position), steps(job), number(job.loss),
    job.workers === job.desired_workers ? job.workers : `${job.workers} of ${job.desired_workers}`, clock(job.created_at)]));
  [...$("jobs").rows].forEach((row, index) => {
    const id = page.items[index].id;
    row.className = id === chosen ? "row chosen" : "row";
    row.addEventListener("click", () => { location.hash = id; });
  });
  if (!chosen && page.items.length) choose(page.items[0].id);
}

function choose(id) {
  if (id === chosen) return;
  chosen = id;
  events = [];
  eventSeq = 0;
  $("events").replaceChildren();
  if (stream) stream.close();
  stream = new EventSource(`/v1/jobs/${encodeURIComponent(id)}`);
  stream.addEventListener("job", (event) => { showJob(JSON.parse(event.data)); refresh(); });
  stream.addEventListener("end", () => { stream.close(); refresh(); });
  $("detail").hidden = true;
}

function showJob(job) {
  const status = job.status;
  $("detail").hidden = false;
  $("title").replaceChildren(`${job.name} `, tag(status.state));
  $("progress").value = status.total_steps ? status.step / status.total_steps : 0;
  $("message").textContent = [status.message, status.note].filter(Boolean).join(" ");
  const facts = [["Project", job.spec.project], ["Priority", job.spec.priority], ...place(job.queue), ["Step", steps(status)], ["Loss", number(status.loss)], ["Validation bits/byte", number(status.val_bits_per_byte)],
    ["Tokens/s", number(status.tokens_per_s)], ["Workers", `${status.workers} of ${status.desired_workers}`],
    ["Remaining", seconds(status.eta_s)], ["Incidents", status.incidents], ["Steps lost", status.steps_lost],
    ["Goodput", status.goodput ? percent(status.goodput.ratio) : "–"], ["Snapshots", snapshots(status)], ["A lost node costs", nodeLoss(status)],
    ["Checkpoint at step", number(status.checkpoint_step, 15)], ["Parameters", number(status.num_parameters)],
    ["Attempt", status.attempt], ["Generation", status.generation]];
  $("facts").replaceChildren(...facts.map(([name, value]) => { const fact = element("div"); fact.append(element("dt", name), element("dd", value)); return fact; }));
  showGoodput(status.goodput);
  $("failure").hidden = !status.failure;
  if (status.failure) $("failure").textContent = `ranks ${status.failure.ranks.join(", ")} at step ${status.failure.step}\n${status.failure.traceback || status.failure.message}`;
}

const nodeLoss = ({ node_loss: bound }) => !bound ? "–" :
  `${bound.at_most === null ? "since the last checkpoint" : `at most ${bound.at_most} steps`}, now ${bound.now} (${bound.protection.replace("_", " ")})`;
const snapshots = (status) => status.snapshot_every_steps === null ? "–" :
  `every ${status.snapshot_every_steps === 1 ? "step" : `${status.snapshot_every_steps} steps`}, ${percent(status.snapshot_share)}`;

function showGoodput(goodput) {
  const total = goodput ? goodput.total : 0;
  $("ratio").textContent = total ? `${percent(goodput.ratio)} of ${seconds(total)} of requested worker time` : "no worker time yet";
  const parts = total ? CATEGORIES.map((name) => [name, goodput.seconds[name] || 0]).filter(([, amount]) => amount > 0) : [];
  stripe($("goodput"), parts, 900, 22);
  $("categories").replaceChildren(...parts.map(([name, amount]) => key(name, `${percent(amount / total)}, ${seconds(amount)}`,
    name === "recovering" ? Object.entries(goodput.recovering).map(([cause, part]) => `${words(cause)} ${seconds(part)}`).join(", ") : "")));
}

function phasesOf(incident) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 160 12");
  stripe(svg, PHASES.map((name) => [name, incident[`${name}_s`] || 0]).filter(([, amount]) => amount > 0), 160, 12);
  return svg;
}

function showIncidents(incidents) {
  $("calm").hidden = incidents.length > 0;
  fill($("incidents"), incidents.map((one) => [new Date(one.at * 1000).toLocaleTimeString(), words(one.cause), one.ranks.join(", "), `${one.from_workers} → ${one.to_workers ?? "…"}`,
    one.action || "–", seconds(one.detect_s), one.closed ? seconds(one.recovery_s) : element("span", "open", "warn"), phasesOf(one),
    number(one.steps_lost), one.bytes_moved === null ? one.state_source ?? "–" : `${one.state_source}, ${bytes(one.bytes_moved)}`]));
  [...$("incidents").rows].forEach((row, index) => { row.title = `${clock(incidents[index].at)} ${incidents[index].message}`; });
  $("phases").replaceChildren(...(incidents.length ? PHASES.map((name) => key(name)) : []));
}

async function refresh() {
  if (refreshing) { again = true; return; }
  refreshing = true;
  const id = chosen;
  try {
    const [series, incidents, workers] = await Promise.all(["series?max_points=800", "incidents", "workers"].map(
      async (part) => { const answer = await fetch(`/v1/jobs/${encodeURIComponent(id)}/${part}`); return answer.ok ? (await answer.json()).items : []; }));
    if (id === chosen) { showHistory(series, incidents, workers); await refreshEvents(id); }
  } catch { /* the streams reconnect and call this again */ }
  refreshing = false;
  if (again) { again = false; refresh(); }
}

// The newest events first. Words and severity come from the service; see docs/reference/events.md.
function showEvents(page) {
  for (const one of page.items) { events.unshift(one); eventSeq = one.seq; }
  events.length = Math.min(events.length, MAX_EVENTS);
  fill($("events"), events.map((one) => [new Date(one.at * 1000).toLocaleTimeString(), element("span", one.message, SEVERITY[one.severity])]));
  [...$("events").rows].forEach((row, index) => { row.title = `${clock(events[index].at)} ${events[index].type}`; });
}

async function refreshEvents(id) {
  for (;;) {
    const answer = await fetch(`/v1/jobs/${encodeURIComponent(id)}/events?after=${eventSeq}&limit=500`);
    if (!answer.ok || id !== chosen) return;
    const page = await answer.json();
    if (id !== chosen) return;
    showEvents(page);
    if (page.items.length < 500) return;
  }
}

function showHistory(series, incidents, workers) {
  const hits = incidents.map((incident) => (series.find((point) => point.at >= incident.at) || {}).step).filter((step) => step !== undefined);
  draw($("loss"), series.filter((point) => point.loss !== null).map((point) => [point.step, point.loss]), { hits });
  draw($("world"), series.map((point) => [point.step, point.world_size]), { hits, area: true });
  showIncidents(incidents);
  fill($("workers"), workers.map((one) => [one.rank ?? "–", one.state, one.phase, one.step, one.generation, one.node_ip, one.pid]));
}

async function showCluster() {
  const cluster = await (await fetch("/v1/cluster")).json();
  $("cluster").textContent = cluster.connected
    ? `${cluster.nodes.filter((node) => node.alive).length} nodes, ${number(cluster.cpus_free)} of ${number(cluster.cpus_total)} CPUs free`
      + (cluster.gpus_total ? `, ${cluster.gpus_free} of ${cluster.gpus_total} GPUs free` : "") : "cluster not connected";
}

const list = new EventSource("/v1/jobs?limit=50");
list.addEventListener("jobs", (event) => { showJobs(JSON.parse(event.data)); showCluster().catch(() => {}); });
list.addEventListener("open", () => { $("live").textContent = "live"; $("live").className = "good"; });
list.addEventListener("error", () => { $("live").textContent = "reconnecting"; $("live").className = "warn"; });
addEventListener("hashchange", () => { choose(location.hash.slice(1)); });
if (location.hash.length > 1) choose(location.hash.slice(1));
