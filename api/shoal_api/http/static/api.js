// Requests to the service. A problem document becomes an Error with its words. A change carries the token that shows that
// it comes from this page; who is not logged in any more is sent to the login page.
import { joined } from "./format.js";

export async function request(
  path,
  { method = "GET", body, type = "application/json", anonymous = false, ifMatch } = {},
) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = type;
  if (ifMatch !== undefined) headers["If-Match"] = ifMatch;
  if (method !== "GET" && !(method === "POST" && path === "/v1/session")) headers["X-CSRF-Token"] = await csrfToken();
  const text = body === undefined || typeof body === "string" ? body : JSON.stringify(body);
  const answer = await fetch(path, { method, headers, body: text });
  const document = (answer.headers.get("content-type") || "").includes("json") ? await answer.json() : null;
  if (!answer.ok) {
    if (answer.status === 401 && !anonymous && location.pathname !== "/login") toLogin();
    const words = [document?.detail || `status ${answer.status}`, wordsOf(document?.errors || [])];
    throw Object.assign(new Error(joined(words, "\n")), { status: answer.status });
  }
  return document;
}

export const post = (path, body, more = {}) => request(path, { method: "POST", body, ...more });
export const put = (path, body) => request(path, { method: "PUT", body });
export const patch = (path, body, more = {}) => request(path, { method: "PATCH", body, ...more });
export const remove = (path) => request(path, { method: "DELETE" });
const YAML = { type: "application/yaml" };
export const submitJob = (text) => post("/v1/jobs", text, YAML);

// What the service says of a spec in YAML; `words`: its errors.
export async function validated(body) {
  const found = await post("/v1/specs/validate", body, YAML);
  return { ...found, words: wordsOf(found.errors) };
}
const wordsOf = (errors) => errors.map((one) => `${one.path || "spec"}: ${one.message}`).join("\n");

// Who is logged in, asked once.
let me = null;
export function whoami() {
  me ??= request("/v1/whoami").catch((error) => {
    me = null;
    throw error;
  });
  return me;
}
export const csrfToken = async () => (await whoami()).csrf_token;

export function toLogin() {
  location.href = `/login#next=${encodeURIComponent(location.pathname + location.search)}`;
}
export const jobPath = (id) => `/v1/jobs/${encodeURIComponent(id)}`;
export const jobPage = (id) => `/jobs/${encodeURIComponent(id)}`;
// The row of a checkpoint on its job's page; the page of a version, by number or alias.
export const stepPage = (id, step) =>
  `${jobPage(id)}#${new URLSearchParams({ tab: "checkpoints", ...(Number.isInteger(step) ? { step } : {}) })}`;
export const modelPath = (one) => `/v1/models/${encodeURIComponent(one.project)}/${encodeURIComponent(one.name)}`;
export const modelPage = (one, which = one.version) =>
  `/models#${new URLSearchParams({ project: one.project, model: one.name, version: which })}`;
// What names a view or a model.
export const keyOf = ({ project, name }) => `${project}/${name}`;
// What a saved view of the table of jobs holds, beside whether archived jobs are in it; and the page that shows a view.
export const KEPT = ["where", "sort", "columns", "search", "state", "label", "cluster"];
export const viewPage = ({ view, ...one }) =>
  view.workspace
    ? `/workspace?view=${encodeURIComponent(keyOf(one))}`
    : `/?${new URLSearchParams(KEPT.filter((name) => view[name]).map((name) => [name, view[name]]))}`;
export const sweepPath = (one) => `/v1/sweeps/${encodeURIComponent(one.project)}/${encodeURIComponent(one.name)}`;
