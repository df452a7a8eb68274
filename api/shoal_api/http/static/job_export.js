// The links that export the table of jobs: the service makes the files, of the chosen jobs, or of all that match.
import { $ } from "./dom.js";
import { query } from "./job_query.js";

const MOST = 500; // jobs that an address names
const FORMATS = [
  ["csv", "CSV"],
  ["parquet", "Parquet"],
];

// `ids`: those of the chosen jobs. They are exported also if the filters do not show them any more.
export function showExports(view, ids) {
  const { sort, columns, order, descending, cluster } = view;
  const asked = ids.length
    ? query({ sort, columns }, { order, descending })
    : query(view, { order, descending, ...(cluster ? { cluster } : {}) });
  for (const id of ids) asked.append("job", id);
  const fits = ids.length <= MOST;
  for (const [format, name] of FORMATS) {
    const link = $(`export-${format}`);
    asked.set("format", format);
    if (fits) link.setAttribute("href", `/v1/job-export?${asked}`);
    else link.removeAttribute("href");
    link.setAttribute("aria-disabled", String(!fits));
    link.textContent = ids.length ? `Export ${ids.length} as ${name}` : `Export ${name}`;
  }
  $("export-words").textContent = fits
    ? ""
    : `A file has at most ${MOST} chosen jobs. Clear the selection to export all jobs that match.`;
}
