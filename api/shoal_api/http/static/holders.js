// The jobs that hold what another one waits for, as links with their names, which come once they are read.
import { link } from "./dom.js";
import { jobPage, jobPath, request } from "./api.js";

const names = new Map();

export const holders = (ids) => ids.flatMap((id, index) => [...(index ? [", "] : []), named(id)]);

function named(id) {
  const made = link(names.get(id) ?? id, jobPage(id));
  if (!names.has(id))
    request(jobPath(id)).then(
      ({ name }) => {
        names.set(id, name);
        made.textContent = name;
      },
      () => {}, // deleted, or of another project: its id stays
    );
  return made;
}
