// The live view: keeps the stream of snapshots open, and passes each to the parts of the view.

import { call, events } from "./api.js";
import { byId, say } from "./dom.js";
import { Lanes } from "./lanes.js";
import { showNumbers } from "./numbers.js";
import { showTree } from "./tree.js";

const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 10_000;
/** Milliseconds between two pictures for those who have asked their system for less motion. */
const CALM = 2000;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Live {
  /** `onUnauthorized` is called when the server wants a key. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.lanes = new Lanes();
    this.abort = null;
    this.shown = -CALM;
    this.paused = false;
  }

  /** Leave the picture as it is, or go on. The server takes no snapshots meanwhile. */
  pause(paused) {
    this.paused = paused;
    byId("pause").setAttribute("aria-pressed", paused);
    if (!paused) return this.connect();
    this.disconnect();
    state("paused", "paused");
  }

  disconnect() {
    this.abort?.abort();
    this.abort = null;
  }

  /** Open the stream, and again whenever it breaks, until `disconnect`; not while it is paused. */
  async connect() {
    this.disconnect();
    if (this.paused) return;
    const { signal } = (this.abort = new AbortController());
    for (let pause = FIRST_PAUSE; !signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
      try {
        for await (const snapshot of events(await call("live", { signal }))) {
          if (signal.aborted) return;
          pause = FIRST_PAUSE;
          this.show(snapshot);
        }
        state("off", "the server has ended the stream");
      } catch (error) {
        if (signal.aborted) return;
        state("off", error.status === 401 ? "needs an API key" : `no live view: ${error.message}`);
        if (error.status === 401) return this.onUnauthorized();
        if (error.status === 404) return;
      }
      await new Promise((resume) => setTimeout(resume, pause));
    }
  }

  show(snapshot) {
    state("live", "live");
    if (calm.matches && performance.now() - this.shown < CALM) return;
    this.shown = performance.now();
    const preset = snapshot.preset ? ` · preset ${snapshot.preset}` : "";
    say(byId("server"), `${snapshot.model}${preset}`);
    showNumbers(snapshot);
    this.lanes.show(snapshot);
    showTree(snapshot.tree, snapshot.drafters);
  }

  /** Say what went wrong. */
  notice(message) {
    say(byId("notice"), message);
  }
}

function state(name, text) {
  byId("connection").dataset.state = name;
  say(byId("connection"), text);
}
