// Begins a session: with the token that is typed in, or with the code of a link, which is behind the # of the address. A link
// that is pasted into a tab at this page changes only that part, so the page is not loaded again and has to look itself.
import { $, attempt, onSubmit } from "./dom.js";
import { post, request } from "./api.js";

let target = "/";

addEventListener("hashchange", readAddress);
onSubmit("login", () => logIn({ token: $("token").value.trim() }));
if (!readAddress())
  request("/v1/whoami", { anonymous: true }).then(
    () => location.replace(target),
    () => {},
  );

// Whether the address has a code. The code is taken out of it, so that it stays in no history.
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)),
    next = given.get("next"),
    code = given.get("code");
  // Only a path of this server: a link must not lead elsewhere after the login.
  if (next && /^\/(?![/\\])/.test(next)) target = next;
  history.replaceState(null, "", "/login");
  if (code) logIn({ code });
  return Boolean(code);
}

async function logIn(body) {
  const begin = () => post("/v1/session", body).then(() => location.replace(target));
  if (!(await attempt(begin, "verdict", "submit"))) $("token").focus();
}
