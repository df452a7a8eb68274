// Begins a session: with the token that is typed in, or with the code of a link, which is behind the # of the address.
import { $ } from "./dom.js";
import { request } from "./api.js";

const given = new URLSearchParams(location.hash.slice(1));
const next = given.get("next") || "/";
// Only a path of this server: a link must not lead elsewhere after the login.
const target = /^\/(?![/\\])/.test(next) ? next : "/";
history.replaceState(null, "", "/login");

$("login").addEventListener("submit", (event) => { event.preventDefault(); logIn({ token: $("token").value.trim() }); });

async function logIn(body) {
  $("submit").disabled = true;
  try {
    await request("/v1/session", { method: "POST", body });
    location.replace(target);
  } catch (error) { $("verdict").textContent = error.message; $("submit").disabled = false; $("token").focus(); }
}

if (given.get("code")) logIn({ code: given.get("code") });
else request("/v1/whoami", { anonymous: true }).then(() => location.replace(target), () => {});
