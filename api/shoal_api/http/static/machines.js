// The page of the fleet: nodes, which are cordoned and drained; its other parts are in timeline.js, queue.js, quotas.js and
// spent.js. The stream of the overview says when something has changed; the rest is read then, but not more often than every three
// seconds.
import { $, button, element, small } from "./dom.js";
import { post, remove, request, whoami } from "./api.js";
import { ask, field } from "./dialog.js";
import { Live } from "./live.js";
import { showNodes } from "./nodes.js";
import { readTimeline, setUpRange, showTimeline } from "./timeline.js";
import { showQueue } from "./queue.js";
import { showQuotas } from "./quotas.js";
import { showSpent } from "./spent.js";
import { throttled } from "./reading.js";

const READ_MS = 3000;
let me = null,
  may = new Set(),
  shown = null;
const soon = throttled(read, READ_MS);
setUpRange(read);

const live = new Live({
  fleet(fleet) {
    shown = fleet;
    showAll();
    soon();
  },
});
whoami().then((found) => {
  me = found;
  may = new Set(me.permissions);
  tell("cluster-role", "cluster:change", "To cordon and drain nodes");
  tell("quota-role", "quotas:change", "To change quotas");
  if (shown) showAll();
  soon();
});
live.open("/v1/overview?limit=1");

const showAll = () =>
  showNodes(shown.nodes, shown.clusters, (node) =>
    node.alive && may.has("cluster:change") ? element("div.controls", buttons(node)) : null,
  );

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

function buttons(node) {
  const name = node.ip || node.node_id.slice(0, 8),
    path = `/v1/nodes/${node.node_id}`;
  const deed = (title, looks, action) =>
    button(title, () => change({ title: `${title} ${name}`, confirm: title, ...action }), {
      class: looks,
      "aria-label": `${title} ${name}`,
    });
  const used = "New workers are placed there again.",
    reason = () => field("Reason", { size: 30, value: "maintenance" });
  const runs = node.num_workers ? `${node.num_workers} of its workers` : "No worker is there, and its workers";
  const isOurs = !node.drain || ["api", "notice"].includes(node.drain.source);
  const cordon = node.cordon
    ? deed("Uncordon", "", { words: used, send: () => remove(`${path}/cordon`) })
    : deed("Cordon", "", {
        input: reason,
        words: "No new worker is placed there. Those that are there stay.",
        send: (value) => post(`${path}/cordon`, { reason: value }),
      });
  if (!isOurs) return [cordon, small("Ray drains it.")];
  const undo = { title: `Use ${name} again`, confirm: "Use it", words: used, send: () => remove(`${path}/drain`) };
  if (node.drain) return [cordon, deed("Undo drain", "", undo)];
  const drain = deed("Drain", "danger", {
    input: () => [reason(), deadline()],
    words: () =>
      `${runs} leave it at their next step boundary and lose no step${minutes() ? `, and before it goes away in ${minutes()} minutes` : ""}. No new worker is placed there.`,
    send: (value) => post(`${path}/drain`, { reason: value, deadline_s: minutes() ? 60 * minutes() : null }),
  });
  return [cordon, drain];
}

const minutes = () => Number($("drain-minutes").value);
const deadline = () =>
  field("It goes away in minutes", {
    id: "drain-minutes",
    type: "number",
    min: 0,
    max: 43200,
    step: "any",
    placeholder: "never",
  });
const change = ({ input, send, ...action }) =>
  ask({ ...action, input: input?.(), send: (value) => send(value).then(read) });
