// What the search over everything (/) finds, by kind: jobs, notes, projects, labels, sweeps, saved views, models, nodes, pages and sections of
// the runbook. Each source is asked for itself, so that one that is refused hides no other; the service answers with what the
// role and its projects see. Jobs are searched by the service, a few at a time; short lists are read once while the search is open.
import { element } from "./dom.js";
import { jobPage, modelPage, request } from "./api.js";
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
const KEPT = ["where", "sort", "columns", "search", "state", "label", "cluster"];
let lists = {};

// The lists are read anew when the search is opened again.
export function forget() {
  lists = {};
}

export async function find(text) {
  const low = text.toLowerCase();
  const sources = [jobs(text, low), ...(low ? [notes(text), views(low), models(low), nodes(low)] : []), topics(low)];
  const found = (await Promise.all(sources.map((one) => one.catch(() => [])))).flat();
  return [
    ...found,
    ...PLACES.filter(([name]) => name.toLowerCase().includes(low)).map(([name, href]) => ({
      kind: "page",
      name,
      href,
    })),
  ];
}

// By name, id, project, user or label; then the projects, the labels and the sweeps of those found.
async function jobs(text, low) {
  const { items } = await request(`/v1/overview?limit=${JOBS}&jobs_only=true&search=${encodeURIComponent(text)}`);
  const has = (name) => low && name.toLowerCase().includes(low),
    unique = (names) => [...new Set(names)].filter(has).slice(0, MOST);
  const labels = items.flatMap((job) => Object.entries(job.labels ?? {}));
  return [
    ...items
      .slice(0, MOST)
      .map((job) => ({ kind: "job", name: `${job.name} ${job.id}`, href: jobPage(job.id), more: badge(job.state) })),
    ...unique(items.map((job) => job.project)).map((name) => ({
      kind: "project",
      name,
      href: `/?project=${encodeURIComponent(name)}`,
    })),
    ...unique(labels.filter(([name]) => name === "sweep").map((one) => one.join("="))).map((name) => ({
      kind: "sweep",
      name,
      href: `/sweeps?label=${encodeURIComponent(name)}`,
    })),
    ...unique(labels.filter(([name]) => name !== "sweep").map((one) => one.join("="))).map((name) => ({
      kind: "label",
      name: name.replace(/=$/, ""),
      href: `/?label=${encodeURIComponent(name.replace(/=$/, ""))}`,
    })),
  ];
}

async function notes(text) {
  const where = `annotation.notes ~ ${JSON.stringify(text)}`;
  const { items } = await request(`/v1/jobs?limit=${MOST}&where=${encodeURIComponent(where)}`);
  return items.map((job) => ({
    kind: "notes",
    name: `of ${job.name} ${job.id}`,
    href: jobPage(job.id),
    more: badge(job.state),
  }));
}

const listOf = (path) => (lists[path] ??= request(path).then(({ items }) => items));

async function views(low) {
  const found = (await listOf("/v1/views")).filter(({ name, project }) =>
    `${project}/${name}`.toLowerCase().includes(low),
  );
  return found.slice(0, MOST).map(({ name, project, view }) => ({
    kind: "view",
    name: `${project}/${name}`,
    href: view.workspace
      ? `/workspace?view=${encodeURIComponent(`${project}/${name}`)}`
      : `/?${new URLSearchParams(KEPT.filter((key) => view[key]).map((key) => [key, view[key]]))}`,
  }));
}

// The newest version of each, and every version that an alias names: speech@prod.
async function models(low) {
  const seen = new Set(),
    found = [];
  for (const one of await listOf("/v1/models")) {
    const key = `${one.project}/${one.name}`,
      which = [...(seen.has(key) ? [] : [one.version]), ...one.aliases];
    seen.add(key);
    found.push(
      ...which
        .filter((word) => `${key}@${word}`.toLowerCase().includes(low))
        .map((word) => ({ kind: "model", name: `${key}@${word}`, href: modelPage(one, word) })),
    );
  }
  return found.slice(0, MOST);
}

async function nodes(low) {
  const found = (await listOf("/v1/nodes")).filter((node) => node.ip.includes(low) || node.node_id.startsWith(low));
  return found
    .slice(0, MOST)
    .map((node) => ({ kind: "node", name: `${node.ip} ${node.node_id.slice(0, 8)}`, href: "/#nodes" }));
}

// The sections of the runbook, by their headings.
async function topics(low) {
  if (!low) return [];
  lists.runbook ??= fetch("/runbook")
    .then((answer) => answer.text())
    .then((text) =>
      [...new DOMParser().parseFromString(text, "text/html").querySelectorAll("section[id]")].map((one) => [
        one.querySelector("h2")?.textContent ?? "",
        one.id,
      ]),
    );
  return (await lists.runbook)
    .filter(([name]) => name.toLowerCase().includes(low))
    .slice(0, MOST)
    .map(([name, id]) => ({ kind: "topic", name, href: `/runbook#${id}` }));
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
export const signOf = (kind) => element("span", SIGNS[kind] ?? "", { class: "sign", "aria-hidden": "true" });
