// The live job page. It only reads. Everything from the service is written with textContent, never as markup.
"use strict";
const $ = (id) => document.getElementById(id);
const MOOD = { RUNNING: "good", SUCCEEDED: "good", FAILED: "bad", CANCELLED: "dim", QUEUED: "dim", PAUSED: "warn",
  RECOVERING: "warn", WAITING: "warn" };
const number = (value, digits = 4) => value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString();
const seconds = (value) => value === null || value === undefined ? "–" : value < 90 ? `${number(value, 3)} s`
  : value < 5400 ? `${number(value / 60, 3)} min` : `${number(value / 3600, 3)} h`;
const clock = (at) => new Date(at * 1000).toLocaleString();
const steps = (job) => number(job.step, 15) + (job.total_steps ? ` / ${number(job.total_steps, 15)}` : "");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text instanceof Node) made.append(text); else if (text !== undefined) made.textContent = String(text);
  if (className) made.className = className;
  return made;
}
const tag = (state) => element("span", state, `tag ${MOOD[state] || "busy"}`);
function fill(body, rows) {
  body.replaceChildren(...rows.map((cells) => { const row = element("tr"); row.append(...cells.map((c) => element("td", c))); return row; }));
}

let chosen = null, stream = null, refreshing = false, again = false;

function showJobs(page) {
  $("none").hidden = page.items.length > 0;
  fill($("jobs"), page.items.map((job) => [element("code", job.id), job.name, tag(job.state), steps(job), number(job.loss),
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
  const facts = [["Step", steps(status)], ["Loss", number(status.loss)], ["Validation bits/byte", number(status.val_bits_per_byte)],
    ["Tokens/s", number(status.tokens_per_s)], ["Workers", `${status.workers} of ${status.desired_workers}`],
    ["Remaining", seconds(status.eta_s)], ["Incidents", status.incidents], ["Steps lost", status.steps_lost],
    ["Checkpoint at step", number(status.checkpoint_step, 15)], ["Parameters", number(status.num_parameters)],
    ["Attempt", status.attempt], ["Generation", status.generation]];
  $("facts").replaceChildren(...facts.map(([name, value]) => { const fact = element("div"); fact.append(element("dt", name), element("dd", value)); return fact; }));
  $("failure").hidden = !status.failure;
  if (status.failure) $("failure").textContent = `ranks ${status.failure.ranks.join(", ")} at step ${status.failure.step}\n${status.failure.traceback || status.failure.message}`;
}

async function refresh() {
  if (refreshing) { again = true; return; }
  refreshing = true;
  const id = chosen;
  try {
    const [series, incidents, workers] = await Promise.all(["series?max_points=800", "incidents", "workers"].map(
      async (part) => { const answer = await fetch(`/v1/jobs/${encodeURIComponent(id)}/${part}`); return answer.ok ? (await answer.json()).items : []; }));
    if (id === chosen) showHistory(series, incidents, workers);
  } catch { /* the streams reconnect, and then this runs again */ }
  refreshing = false;
  if (again) { again = false; refresh(); }
}

function showHistory(series, incidents, workers) {
  const hits = incidents.map((incident) => (series.find((point) => point.at >= incident.at) || {}).step).filter((step) => step !== undefined);
  draw($("loss"), series.filter((point) => point.loss !== null).map((point) => [point.step, point.loss]), { hits });
  draw($("world"), series.map((point) => [point.step, point.world_size]), { hits, area: true });
  fill($("incidents"), incidents.map((one) => [clock(one.at), one.cause, one.ranks.join(", "), `${one.from_workers} → ${one.to_workers ?? "…"}`,
    seconds(one.detect_s), one.closed ? seconds(one.recovery_s) : element("span", "open", "warn"), number(one.steps_lost), one.state_source ?? "–"]));
  fill($("workers"), workers.map((one) => [one.rank ?? "–", one.state, one.phase, one.step, one.generation, one.node_ip, one.pid]));
}

function draw(svg, points, { hits, area }) {
  const [width, height, left, bottom, top] = [900, svg.viewBox.baseVal.height, 52, 20, 8];
  const add = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  svg.replaceChildren();
  if (!points.length) { add("text", { x: left, y: height / 2 }, "no steps yet"); return; }
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const values = points.map((point) => point[1]);
  const low = area ? 0 : Math.min(...values), high = Math.max(...values, low + 1e-9);
  const x = (step) => left + (width - left - 8) * (last === first ? 0.5 : (step - first) / (last - first));
  const y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low));
  for (const value of area ? [0, high] : [low, (low + high) / 2, high]) {
    add("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "grid" });
    add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 3));
  }
  for (const step of [first, last]) add("text", { x: x(step), y: height - 4, "text-anchor": step === first ? "start" : "end" }, `step ${step}`);
  for (const step of hits) add("line", { x1: x(step), x2: x(step), y1: top, y2: height - bottom, class: "hit" });
  if (!area) { add("polyline", { points: points.map(([s, v]) => `${x(s)},${y(v)}`).join(" "), class: "curve" }); return; }
  const stairs = points.flatMap(([s, v], index) => [`${x(index ? s : first)},${y(index ? points[index - 1][1] : v)}`, `${x(s)},${y(v)}`]);
  add("polygon", { points: [`${x(first)},${y(0)}`, ...stairs, `${x(last)},${y(0)}`].join(" "), class: "area" });
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
