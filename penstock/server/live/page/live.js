// The engine's live view: reads /live and hands every frame to the parts that draw it.

import { call, events } from "./api.js";
import { Engines } from "./engines.js";
import { Figures } from "./figures.js";
import { Flow } from "./flow.js";
import { Pipeline } from "./pipeline.js";
import { Requests } from "./requests.js";
import { Tree } from "./tree.js";

const AGAIN_MS = 2000;
const dot = document.getElementById("dot");
const state = document.getElementById("state");
const parts = [document.getElementById("now"), document.getElementById("engine")];

export class Live {
  constructor() {
    this._parts = [new Figures(), new Engines(), new Pipeline(), new Flow(), new Tree(), new Requests()];
    this._reading = null;
    this._id = null;
    this._setup = "";
    document.addEventListener("visibilitychange", () => this.follow(this._id));
  }

  /** Read on, as the one who has sent the request with this id (null: nobody's); not while nobody looks. */
  async follow(id) {
    this._id = id;
    this._reading?.abort();
    if (document.hidden) return;
    const reading = (this._reading = new AbortController());
    while (!reading.signal.aborted) {
      try {
        await this._read(id, reading.signal);
        if (!reading.signal.aborted) say("down", "the server has ended");
      } catch (error) {
        if (reading.signal.aborted) return;
        say("down", error.status ? error.message : "no connection, trying again");
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  async _read(id, signal) {
    const path = id === null ? "live" : `live?request=${encodeURIComponent(id)}`;
    const response = await call(path, { signal });
    for await (const { event, data } of events(response)) {
      if (signal.aborted) return;
      const message = JSON.parse(data);
      if (event === "setup" && data !== this._setup) for (const part of this._parts) part.setup?.(message);
      if (event === "setup") this._setup = data;
      if (event === "frame") this._show(message);
    }
  }

  _show(frame) {
    const { running, waiting, recovering, ended } = frame.stats;
    if (ended) say("down", `the engine has ended: ${ended}`);
    else if (recovering) say("recovering", "recovering");
    else say(running ? "busy" : "idle", running ? "working" : waiting ? "waiting" : "idle");
    for (const part of this._parts) part.frame(frame);
  }
}

function say(kind, words) {
  dot.className = `dot ${kind}`;
  for (const part of parts) part.classList.toggle("stale", kind === "down");
  if (state.textContent !== words) state.textContent = words;
}
