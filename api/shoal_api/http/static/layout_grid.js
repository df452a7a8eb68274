// The ranks on their nodes, coloured by their place on an axis of the layout, framed by their state: one sees the group re-form.
import { $, element, fillEach, rows, smallLine } from "./dom.js";
import { bytes, number, percent, words } from "./format.js";

// tp varies fastest, pp slowest; see Layout in contract/layout.py. ep uses ranks of fsdp, so it is no axis here.
const ORDER = ["pp", "dp", "fsdp", "cp", "tp"];
const STATES = ["training", "warm", "starting", "stopping"];
let last = [[], null];
$("colour").addEventListener("change", () => showWorkers(...last));

export function showWorkers(workers, job) {
  last = [workers, job];
  const layout = job?.status.layout || "";
  $("layout").textContent = layout;
  const degrees = Object.fromEntries(
    [...layout.matchAll(/(pp|fsdp|dp|cp|tp)(\d+)/g)].map(([, axis, degree]) => [axis, Number(degree)]),
  );
  const axes = ORDER.filter((axis) => degrees[axis] > 1);
  showChoice(axes.length ? axes : ["fsdp"]);
  const axis = $("colour").value;
  const nodes = new Map();
  for (const worker of [...workers].sort((a, b) => (a.rank ?? 1e9) - (b.rank ?? 1e9))) {
    const name = worker.node_ip || worker.node_id || "being placed";
    nodes.set(name, [...(nodes.get(name) || []), worker]);
  }
  fillEach(
    "grid",
    [...nodes].sort(([a], [b]) => a.localeCompare(b)),
    ([name, on]) =>
      element("div.node", [
        smallLine(name),
        element(
          "div.cells",
          on.map((worker) => cell(worker, degrees, axis)),
        ),
      ]),
  );
  fillEach("cell-key", STATES, (state) =>
    element("li", [element("span", "", { class: `swatch mark ${state}` }), state]),
  );
  rows("workers", workers, (one) => [
    one.rank ?? "–",
    one.state,
    words(one.phase),
    one.step,
    one.generation,
    one.node_ip || "–",
    one.pid || "–",
    ...use(one.use),
  ]);
  $("coloured-by").hidden = $("cell-key").hidden = $("worker-table").hidden = !workers.length;
  if (!workers.length) $("grid").textContent = "No workers now.";
}

// CPUs that it keeps busy, its memory, what is taken of /dev/shm and of the GPU on its node.
const use = (found) =>
  !found
    ? ["–", "–", "–", "–"]
    : [
        number(found.cpu_cores, 3),
        bytes(found.resident_bytes),
        of(found.shm_bytes, found.shm_free_bytes),
        found.gpu_bytes
          ? `${of(found.gpu_bytes, found.gpu_free_bytes)}${found.gpu_busy === null ? "" : `, busy ${percent(found.gpu_busy)}`}`
          : "–",
      ];
const of = (size, free) => (size ? `${bytes(size - free)} of ${bytes(size)}` : "–");

function cell(worker, degrees, axis) {
  const place = worker.rank === null ? {} : coordinates(worker.rank, degrees);
  const coordinatesText = ORDER.filter((name) => degrees[name] > 1)
    .map((name) => `${name} ${place[name]}`)
    .join(", ");
  const inside = [element("b", worker.rank ?? "+"), words(worker.phase).slice(0, 8)];
  const colour = worker.rank === null ? "" : `axis${(place[axis] ?? 0) % 6}`;
  return element("div", inside, {
    class: `cell ${worker.state} ${colour}`,
    title: `rank ${worker.rank ?? "none yet"}: ${worker.state}, ${words(worker.phase)}, step ${worker.step}${coordinatesText ? `; ${coordinatesText}` : ""}; pid ${worker.pid}`,
  });
}

export function coordinates(rank, degrees) {
  const place = {};
  for (const axis of [...ORDER].reverse()) {
    const degree = degrees[axis] || 1;
    place[axis] = rank % degree;
    rank = Math.floor(rank / degree);
  }
  return place;
}

function showChoice(axes) {
  const before = $("colour").value,
    names = axes.join();
  if ($("colour").dataset.axes === names) return;
  $("colour").dataset.axes = names;
  fillEach("colour", axes, (axis) => new Option(axis, axis));
  if (axes.includes(before)) $("colour").value = before;
}
