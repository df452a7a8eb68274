// The page of the fleet: nodes, which are cordoned and drained; its other parts are in timeline.js, timeline_range.js, queue.js, quotas.js and
// spent.js. The stream of the overview says when something has changed; the rest is read then, but not more often than every three
// seconds.
import { $, button, element, fill, small } from "./dom.js";
import { request } from "./api.js";
import { ask, field } from "./dialog.js";
import { Live, throttled } from "./live.js";
import { head } from "./clusters.js";
import { nodeCard } from "./nodes.js";
import { showTimeline } from "./timeline.js";
import { readTimeline, setUpRange } from "./timeline_range.js";
import { showQueue } from "./queue.js";
import { showQuotas } from "./quotas.js";
import { showSpent } from "./spent.js";

const READ_MS = 3000;
let me = null,
  may = new Set(),
  shown = null;
const soon = throttled(read, READ_MS);
setUpRange(read);

const live = new Live({
  fleet(fleet) {
    shown = fleet;
    showNodes();
    soon();
  },
});
request("/v1/whoami").then((found) => {
  me = found;
  may = new Set(me.permissions);
  tell("cluster-role", "cluster:change", "To cordon and drain nodes");
  tell("quota-role", "quotas:change", "To change quotas");
  if (shown) showNodes();
  soon();
});
live.open("/v1/overview?limit=1");

// Why there are no buttons.
function tell(id, permission, what) {
  $(id).hidden = may.has(permission);
  $(id).textContent =
    `${what} you need the role admin${me.projects ? " and a token that is not bound to projects" : ""}. You are ${me.name}, with the role ${me.role}${me.projects ? ` in ${me.projects.join(", ")}` : ""}.`;
}

async function read() {
  if (!me) return; // what may be changed is not known yet
  const hours = $("hours").value;
  const found = await Promise.all([readTimeline(), request("/v1/queue")]);
  if (hours !== $("hours").value) return; // another time was chosen meanwhile
  const [timeline, queue] = found;
  showTimeline(timeline);
  showQueue(queue);
  showQuotas(queue.projects, may.has("quotas:change"), read);
  showSpent(timeline);
}

function showNodes() {
  const { nodes, clusters } = shown,
    several = clusters.length > 1;
  const made = (node) =>
    nodeCard(
      node,
      node.alive && may.has("cluster:change") ? [element("div", buttons(node), { class: "controls" })] : [],
    );
  fill(
    "nodes",
    several
      ? clusters.flatMap((one) => [head(one), ...nodes.filter((node) => node.cluster === one.name).map(made)])
      : nodes.map(made),
  );
  if (!nodes.length) $("nodes").textContent = "No node has joined yet.";
}

function buttons(node) {
  const name = node.ip || node.node_id.slice(0, 8),
    path = `/v1/nodes/${node.node_id}`;
  const deed = (title, looks, press) => button(title, press, { class: looks, "aria-label": `${title} ${name}` });
  const reason = () => field("Reason", { size: 30, value: "maintenance" });
  const runs = node.num_workers ? `${node.num_workers} of its workers` : "No worker is there, and its workers";
  const deadline = field("It goes away in minutes", {
    id: "drain-minutes",
    type: "number",
    min: 0,
    max: 43200,
    step: "any",
    placeholder: "never",
  });
  const is_ours = !node.drain || ["api", "notice"].includes(node.drain.source);
  return [
    node.cordon
      ? deed("Uncordon", "", () =>
          change(`Uncordon ${name}`, "Uncordon", "New workers are placed there again.", () =>
            request(`${path}/cordon`, { method: "DELETE" }),
          ),
        )
      : deed("Cordon", "", () =>
          change(
            `Cordon ${name}`,
            "Cordon",
            "No new worker is placed there. Those that are there stay.",
            (value) => request(`${path}/cordon`, { method: "POST", body: { reason: value } }),
            [reason()],
          ),
        ),
    !is_ours
      ? small("Ray drains it.")
      : node.drain
        ? deed("Undo drain", "", () =>
            change(`Use ${name} again`, "Use it", "New workers are placed there again.", () =>
              request(`${path}/drain`, { method: "DELETE" }),
            ),
          )
        : deed("Drain", "danger", () =>
            change(
              `Drain ${name}`,
              "Drain",
              () =>
                `${runs} leave it at their next step boundary and lose no step${minutes() ? `, and before it goes away in ${minutes()} minutes` : ""}. No new worker is placed there.`,
              (value) =>
                request(`${path}/drain`, {
                  method: "POST",
                  body: { reason: value, deadline_s: minutes() ? 60 * minutes() : null },
                }),
              [reason(), deadline],
            ),
          ),
  ];
}

const minutes = () => Number($("drain-minutes").value);

// words: a text, or a function that makes one of the fields of the dialog.
function change(title, confirm, words, send, input = []) {
  ask({
    title,
    confirm,
    input,
    words: async () => (typeof words === "string" ? words : words()),
    send: async (value) => {
      await send(value);
      await read();
    },
  });
}
