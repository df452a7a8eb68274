// What the search over everything (/) finds, by kind: jobs, notes, projects, labels, sweeps, saved views, models, nodes, pages and sections of
// the runbook. Each source is asked for itself, so that one that is refused hides no other; the service answers with what the
// role and its projects see. Jobs are searched by the service, a few at a time; short lists are read once while the search is open.
import { element } from "./dom.js";
import { jobPage, keyOf, modelPage, request, viewPage } from "./api.js";
import { badge } from "./states.js";

const MOST = 8,
  JOBS = 20;
const PLACES = [
  ["All jobs", "/"],
  ["Workspace", "/workspace"],
  ["Compare jobs", "/compare"],
  ["Sweeps", "/sweeps"],
  ["Models", "/models"],
  ["Fleet", "/fleet"],
  ["Account and tokens", "/account"],
  ["REST API", "/docs"],
  ["Runbook", "/runbook"],
];
let lists = {};

// The lists are read anew when the search is opened again.
export function forget() {
  lists = {};
}

// toHit(one): its name, its address, and what is shown behind it.
const hits = (kind, found, toHit) =>
  found
    .slice(0, MOST)
    .map(toHit)
    .map(([name, href, more]) => ({ kind, name, href, more }));

export async function find(text) {
  const low = text.toLowerCase(),
    has = (name) => name.toLowerCase().includes(low);
  const sources = [jobs(text, has), ...(low ? [notes(text), views(has), models(has), nodes(low), topics(has)] : [])];
  const found = await Promise.all(sources.map((source) => source.catch(() => [])));
  const places = PLACES.filter(([name]) => has(name)).map(([name, href]) => ({ kind: "page", name, href }));
  return [...found.flat(), ...places];
}

// By name, id, project, user or label; then the projects, the labels and the sweeps of those found.
async function jobs(text, has) {
  const { items } = await request(`/v1/overview?limit=${JOBS}&jobs_only=true&search=${encodeURIComponent(text)}`);
  const labels = items.flatMap((job) => Object.entries(job.labels ?? {})),
    isSweep = ([name]) => name === "sweep",
    texts = (some) => some.map((label) => label.join("="));
  const linked = (kind, names, address) =>
    hits(kind, [...new Set(text ? names : [])].filter(has), (name) => {
      const bare = name.replace(/=$/, "");
      return [bare, address + encodeURIComponent(bare)];
    });
  const projects = items.map((job) => job.project);
  return [
    ...hits("job", items, (job) => [`${job.name} ${job.id}`, jobPage(job.id), badge(job.state)]),
    ...linked("project", projects, "/?project="),
    ...linked("sweep", texts(labels.filter(isSweep)), "/sweeps?label="),
    ...linked("label", texts(labels.filter((label) => !isSweep(label))), "/?label="),
  ];
}

async function notes(text) {
  const where = `annotation.notes ~ ${JSON.stringify(text)}`;
  const { items } = await request(`/v1/jobs?limit=${MOST}&where=${encodeURIComponent(where)}`);
  return hits("notes", items, (job) => [`of ${job.name} ${job.id}`, jobPage(job.id), badge(job.state)]);
}

const listOf = (path) => (lists[path] ??= request(path).then(({ items }) => items));

async function views(has) {
  const found = (await listOf("/v1/views")).filter((one) => has(keyOf(one)));
  return hits("view", found, (one) => [keyOf(one), viewPage(one)]);
}

// The newest version of each, and every version that an alias names: speech@prod.
async function models(has) {
  const seen = new Set();
  const found = (await listOf("/v1/models")).flatMap((one) => {
    const key = keyOf(one),
      which = [...(seen.has(key) ? [] : [one.version]), ...one.aliases];
    seen.add(key);
    return which.map((word) => [`${key}@${word}`, modelPage(one, word)]).filter(([name]) => has(name));
  });
  return hits("model", found, (hit) => hit);
}

async function nodes(low) {
  const found = (await listOf("/v1/nodes")).filter((node) => node.ip.includes(low) || node.node_id.startsWith(low));
  return hits("node", found, (node) => [`${node.ip} ${node.node_id.slice(0, 8)}`, "/#nodes"]);
}

// The sections of the runbook, by their headings.
async function topics(has) {
  lists.runbook ??= fetch("/runbook")
    .then((answer) => answer.text())
    .then((text) => [...new DOMParser().parseFromString(text, "text/html").querySelectorAll("section[id]")]);
  const title = (section) => section.querySelector("h2")?.textContent ?? "",
    found = (await lists.runbook).filter((section) => has(title(section)));
  return hits("topic", found, (section) => [title(section), `/runbook#${section.id}`]);
}

// The sign before the name of a kind, which is text: programs that read the screen aloud skip the sign.
const SIGNS = {
  job: "▶",
  notes: "✎",
  project: "▣",
  label: "#",
  sweep: "⑃",
  view: "▤",
  model: "◆",
  node: "▦",
  topic: "?",
  page: "→",
};
export const signOf = (kind) => element("span.sign", SIGNS[kind] ?? "", { "aria-hidden": "true" });
