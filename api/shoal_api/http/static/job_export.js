// All jobs that match as a file of comma-separated values: with the chosen columns, or the fields of the list.
import { $ } from "./dom.js";
import { bare, everyJob, split } from "./job_query.js";

const USUAL = ["id", "name", "state", "project", "user", "priority", "step", "total_steps", "loss", "tokens_per_s", "workers", "goodput", "incidents", "created_at", "updated_at"];

export function setUpExport(view) {
  $("export").addEventListener("click", async () => {
    $("export").disabled = true;
    try { save(csv(await everyJob(view), split(view.columns).map(bare))); } finally { $("export").disabled = false; $("export").focus(); }
  });
}

export function csv(jobs, columns) {
  const names = columns.length ? ["id", "name", "state", ...columns.filter((name) => !["id", "name", "state"].includes(name))] : USUAL;
  const value = (job, name) => ["id", "name", "state"].includes(name) || !columns.length ? job[name] : job.values[name];
  return [names, ...jobs.map((job) => names.map((name) => value(job, name)))].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function save(text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "jobs.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}
