// What the program of a job has written below its directory. Names and contents are the job's: names are shown as text,
// contents are only downloaded.
import { $, link, rows } from "./dom.js";
import { jobPath, request } from "./api.js";
import { bytes, joined, moment, plural, whole } from "./format.js";
import { latest } from "./reading.js";

const MOST_FILES = 1000;

export const showFiles = latest(ask, (page, id) => {
  rows("files", page.items, (file) => [link(file.name, pathOf(id, file)), bytes(file.bytes), moment(file.modified_at)]);
  $("files-said").textContent = describe(page);
});

function ask(id) {
  $("files-match").oninput = () => showFiles(id).catch(() => {});
  const query = new URLSearchParams({ match: $("files-match").value.trim() || "**", limit: MOST_FILES });
  return request(`${jobPath(id)}/files?${query}`);
}

const pathOf = (id, file) => `${jobPath(id)}/files/${file.name.split("/").map(encodeURIComponent).join("/")}`;

function describe(page) {
  const first = page.num_files > page.items.length ? `the first ${whole(page.items.length)} of ` : "";
  const total = page.num_files ? `${first}${plural(page.num_files, "file")}, ${bytes(page.bytes)}` : "";
  if (!page.num_left_out) return total;
  const leftOut = `${plural(page.num_left_out, "file")} with ${bytes(page.bytes_left_out)} not kept (outputs.max_gib)`;
  return joined([total, leftOut], "; ");
}
