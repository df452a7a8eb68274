// The one stream of a page. The browser connects again by itself, with the id of the last event, and the service sends
// what was missed. The word in the header says how the connection is.
import { $ } from "./dom.js";
import { request } from "./api.js";

export class Live {
  constructor(handlers) { this.handlers = handlers; this.source = null; }

  open(url) {
    this.close();
    const source = this.source = new EventSource(url);
    source.addEventListener("open", () => say("live", "run"));
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) { say("disconnected", "bad"); request("/v1/whoami").catch(() => {}); setTimeout(() => { if (this.source === source) this.open(url); }, 2000); }
      else say("reconnecting", "warn");
    });
    for (const [name, handle] of Object.entries(this.handlers)) source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    source.addEventListener("end", () => { source.close(); say("ended", "dim"); });
  }

  close() { if (this.source) this.source.close(); this.source = null; }
}

function say(text, colour) { $("live").textContent = text; $("live").className = colour; }
