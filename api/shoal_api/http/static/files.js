// What the program of a job has written below its directory. Names and contents are the job's: names are shown as text,
// contents are only downloaded.
import { $, fill, link, row } from "./dom.js";
import { jobPath, request } from "./api.js";
import { bytes, moment, plural } from "./format.js";

const MOST_FILES = 1000;
let asked = 0;

export async function showFiles(id) {
  const turn = ++asked, pattern = $("files-match").value.trim() || "**";
  const page = await request(`${jobPath(id)}/files?${new URLSearchParams({ match: pattern, limit: MOST_FILES })}`);
  if (turn !== asked) return;
  $("files-match").oninput = () => showFiles(id).catch(() => {});
  $("files-table").hidden = !page.items.length;
  $("no-files").hidden = Boolean(page.items.length);
  fill("files", page.items.map((file) => row([link(file.name, `${jobPath(id)}/files/${file.name.split("/").map(encodeURIComponent).join("/")}`), bytes(file.bytes), moment(file.modified_at)])));
  const more = page.num_files > page.items.length ? `the first ${page.items.length} of ` : "";
  const leftOut = page.num_left_out ? `; ${plural(page.num_left_out, "file")} with ${bytes(page.bytes_left_out)} not kept (outputs.max_gib)` : "";
  $("files-said").textContent = page.num_files ? `${more}${plural(page.num_files, "file")}, ${bytes(page.bytes)}${leftOut}` : "";
}
