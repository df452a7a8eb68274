// Search runs in a worker, and a browser starts none for a page that it has opened from a file. There this takes its
// place: the worker's script runs in a hidden frame. Loaded by the theme as a polyfill (mkdocs.yml).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = (...urls) => {
        for (const address of urls) {
          // A module of a language, which search awaits only if a page needs it.
          this.append(new URL(address, url));
        }
      };
      this.ready = this.append(url);
    }

    append(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.scope.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
