// What the table of jobs asks the service for, from the view in the address; and all jobs that match, page by page.
import { request } from "./api.js";

const ACTIVE = ["QUEUED", "STARTING", "RUNNING", "RECOVERING", "RESIZING", "WAITING", "PAUSING"];
export const NOTHING = {
  search: "",
  state: "",
  project: "",
  label: "",
  cluster: "",
  where: "",
  sort: "",
  columns: "",
  archived: "",
  order: "created",
  descending: "true",
  offset: "0",
};
const PAGE = 1000;

// The parameters that both lists of the service have; `extra`: further ones.
export function query(view, extra = {}) {
  const asked = new URLSearchParams(extra);
  for (const name of ["search", "project", "label", "where", "sort", "columns", "archived"])
    if (view[name]) asked.set(name, view[name]);
  for (const state of view.state === "active" ? ACTIVE : view.state ? [view.state] : []) asked.append("state", state);
  return asked;
}

// Throws if a text of the view is wrong: a stream could not say why.
export async function checked(view) {
  if (view.where || view.sort || view.columns) await request(`/v1/jobs?${query(view, { limit: 1 })}`);
}

export async function everyJob(view) {
  const parts = [view.where && `(${view.where})`, view.cluster && `cluster == "${view.cluster}"`].filter(Boolean);
  const found = [];
  let cursor = null;
  do {
    const page = await request(
      `/v1/jobs?${query({ ...view, where: parts.join(" and ") }, { limit: PAGE, ...(cursor ? { cursor } : {}) })}`,
    );
    found.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor);
  return found;
}

// Names in a list that is separated by commas; a quoted name may hold one.
export const split = (text) => (text.match(/(?:"[^"]*"|[^,"])+/g) ?? []).map((name) => name.trim()).filter(Boolean);
export const bare = (name) => name.replaceAll('"', "");
