// The one stream of a page. The browser connects again by itself, with the id of the last event, and the service sends
// what was missed. The word in the header says how the connection is. A browser opens at most six connections to a server,
// so a page that nobody looks at gives its stream up, and is sent everything anew when it is looked at again. One that was
// left does so at once: the browser keeps it, with its connection, for the way back.
import { say } from "./dom.js";
import { request } from "./api.js";

const HIDDEN_MS = 15000,
  RETRY_MS = 2000;

export class Live {
  constructor(handlers) {
    this.handlers = handlers;
    this.source = null;
    this.url = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.look());
    addEventListener("pagehide", () => this.pause());
    addEventListener("pageshow", ({ persisted }) => {
      if (persisted) this.look();
    });
  }

  open(url) {
    this.close();
    this.url = url;
    if (document.hidden) say("live", "paused", "dim");
    else this.connect();
  }

  connect() {
    const source = (this.source = new EventSource(this.url));
    source.addEventListener("open", () => say("live", "live", "run"));
    source.addEventListener("error", () => {
      if (source.readyState !== EventSource.CLOSED) {
        say("live", "reconnecting", "warn");
        return;
      }
      say("live", "disconnected", "bad");
      request("/v1/whoami").catch(() => {}); // it leads to the login page if the session is over
      setTimeout(() => {
        if (this.source === source) this.open(this.url);
      }, RETRY_MS);
    });
    for (const [name, handle] of Object.entries(this.handlers))
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    source.addEventListener("end", () => {
      this.close();
      say("live", "ended", "dim");
    });
  }

  look() {
    clearTimeout(this.timer);
    if (!this.url) return;
    if (!document.hidden) {
      if (!this.source) {
        say("live", "connecting", "dim");
        this.connect();
      }
      return;
    }
    this.timer = setTimeout(() => this.pause(), HIDDEN_MS);
  }

  pause() {
    if (!this.source) return;
    this.source.close();
    this.source = null;
    say("live", "paused", "dim");
  }

  // For good: it is not opened again when the page is looked at.
  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    this.url = null;
  }
}
