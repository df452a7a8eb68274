// What the weights of a job come from, as a table: the job itself, then the one that it goes on from, and so on.
import { element, link, rows, said } from "./dom.js";
import { jobPage, stepPage } from "./api.js";
import { whole } from "./format.js";

export const fillLineage = (jobs) =>
  rows("lineage", jobs, (one) => [
    one.is_known
      ? link(
          one.name || one.job_id,
          jobPage(one.job_id),
          jobPage(one.job_id) === location.pathname ? { "aria-current": "page" } : {},
        )
      : `${one.job_id} (deleted, or not visible)`,
    origin(one),
    said([one.code, short(one.code_sha256)]),
    said([one.data_source, short(one.data)]),
    short(one.spec_sha256),
  ]);

const short = (hash) => (hash ? element("code", ` ${hash.slice(0, 12)}`, { title: hash }) : "");
const origin = (one) =>
  !one.parent
    ? one.is_known
      ? "its seed"
      : "–"
    : one.parent.job_id
      ? link(
          one.parent.step === null
            ? `the files of ${one.parent.job_id}`
            : `step ${whole(one.parent.step)} of ${one.parent.job_id}`,
          stepPage(one.parent.job_id, one.parent.step),
        )
      : `weights of ${one.parent.url}`;
