// Who one is, the end of the session, and API tokens: make one, see when it was used, revoke it. The service shows a token once.
// Admins have the tokens of all here; a person those of the same user, and makes some that end with the person's own; a program its own.
import { $, attempt, button, element, fillEach, fillFacts, onSubmit, rows } from "./dom.js";
import { post, remove, request, whoami } from "./api.js";
import { ask } from "./dialog.js";
import { moment, wordsIn } from "./format.js";

const DAY_S = 86400,
  ROLES = ["scraper", "viewer", "operator", "admin"];
const MAKES =
  "Your tokens may do no more than you, and end with the token that you have logged in with. Programs use them: they make no others.";
const MAKES_NONE =
  "The token of this session was made for a program, so it makes no other tokens. An admin makes one for a person: on this page, or with shoal token create NAME --personal.";
let me = null,
  tokens = [];

$("log-out").addEventListener("click", async () => {
  await remove("/v1/session");
  location.href = "/login";
});
for (const name of ["mine", "ended"]) $(name).addEventListener("change", show);
onSubmit("make", () => attempt(make, "token-error"));

async function make() {
  const days = $("token-expires").value,
    projects = wordsIn($("token-projects").value);
  const made = await post("/v1/tokens", {
    name: $("token-name").value.trim(),
    role: $("token-role").value,
    projects: projects.length ? projects : null,
    expires_in_s: days ? Number(days) * DAY_S : null,
    personal: manages() && $("token-personal").checked,
  });
  $("secret").textContent = made.token;
  $("made").hidden = false;
  $("token-name").value = "";
  $("token-personal").checked = false;
  await read();
}

whoami().then((found) => {
  me = found;
  fillFacts("me", [
    ["Name", me.name],
    ["Role", me.role],
    ["Projects", me.projects ? me.projects.join(", ") : "all"],
    ["Jobs run as", me.user || "user in the spec"],
    ["Token", me.token_id || "of the OIDC issuer"],
    ["It expires", me.expires_at === null ? "never" : moment(me.expires_at)],
  ]);
  fillEach("permissions", me.permissions, (name) => element("li", element("code", name)));
  const has = me.permissions.includes("tokens:own");
  $("tokens-part").hidden = !has;
  $("make").hidden = !me.makes_tokens;
  $("personal-part").hidden = $("mine-part").hidden = !manages();
  $("tokens-words").hidden = manages();
  $("tokens-words").textContent = !has
    ? "This token reads metrics and has no others."
    : me.makes_tokens
      ? MAKES
      : MAKES_NONE;
  for (const one of [...$("token-role").options]) if (ROLES.indexOf(one.value) > ROLES.indexOf(me.role)) one.remove();
  if (me.projects) $("token-projects").placeholder = me.projects.join(", ");
  if (has) read();
});

const manages = () => me.permissions.includes("tokens:manage");

async function read() {
  tokens = (await request("/v1/tokens")).items;
  show();
}

const isOver = (token) =>
  token.revoked_at !== null || (token.expires_at !== null && token.expires_at * 1000 < Date.now());
const isMine = (token) =>
  !manages() || token.created_by === me.name || token.id === me.token_id || token.name === me.name;

function show() {
  const shown = tokens.filter(
    (token) => ($("ended").checked || !isOver(token)) && (!$("mine").checked || isMine(token)),
  );
  rows("tokens", shown, (token) => [
    element("td.title", [token.name, token.personal ? [" ", element("span.badge", "personal")] : null]),
    element("code", token.id),
    token.role,
    token.projects ? token.projects.join(", ") : "all",
    moment(token.created_at),
    token.created_by,
    moment(token.last_used_at),
    token.revoked_at !== null
      ? `revoked ${moment(token.revoked_at)}`
      : token.expires_at === null
        ? "never"
        : moment(token.expires_at),
    isOver(token)
      ? ""
      : button("Revoke", () => revoke(token), {
          class: "danger",
          "data-token": token.id,
          "aria-label": `Revoke the token ${token.name}`,
        }),
  ]);
}

function revoke(token) {
  const isOwn = token.id === me.token_id,
    own = isOwn
      ? " It is the token of this session: you are logged out."
      : token.personal
        ? " The tokens that were made with it end too."
        : "";
  ask({
    title: `Revoke the token ${token.name}`,
    confirm: "Revoke",
    words: () => `Requests with it are refused from now on, and its sessions end.${own} This cannot be undone.`,
    send: async () => {
      await remove(`/v1/tokens/${token.id}`);
      if (isOwn) location.href = "/login";
      else await read();
    },
  });
}
