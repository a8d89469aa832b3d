// The figures above the picture, and the KV memory. Rates are differences of two frames' counts.

import { clock } from "./clock.js";
import { Window } from "./window.js";

/** The counts before anything was drafted. */
const NOTHING = { drafts: 0, accepted_tokens: 0, misses: 0 };

const byId = (id) => document.getElementById(id);

export class Figures {
  constructor() {
    this._window = new Window();
    this._working = false;
    /** When the figures were last those of work; null before. */
    this._from = null;
  }

  setup({ strategy, drafter, stages, emulated }) {
    const how = strategy === "autoregressive" ? "no speculation" : `${strategy} strategy, ${drafter.replaceAll("_", " ")} drafter`;
    const hosts = new Set(stages.map(({ host }) => host)).size;
    const split = counted(stages.length, "stage") + (hosts > 1 ? ` on ${hosts} hosts` : "");
    byId("setup").textContent = [split, how, ...(emulated ? ["emulated devices"] : [])].join(" · ");
    byId("setup").title = emulated ?? "";
    this._window.clear();
    this._working = false;
    this._from = null;
    for (const id of ["speed", "acceptance", "hits"]) set(id, "–");
  }

  frame(frame) {
    const { stats } = frame;
    const { then, seconds } = this._window.add(frame);
    const working = stats.running > 0;
    if (working || this._working) {
      this._speed(stats, then, seconds);
      this._speculation(stats, then);
      this._from = new Date();
    } else if (this._from === null) {
      this._speculation(stats, NOTHING);
    }
    this._working = working;
    set("running", `${stats.running}`);
    set("waiting", `${stats.waiting}`);
    set("as-of", this._when(stats));
    this._memory(stats);
  }

  _speed(now, then, seconds) {
    const tokens = now.generation_tokens - then.generation_tokens;
    if (tokens > 0 && seconds > 0.3) set("speed", (tokens / seconds).toFixed(1));
  }

  /** Where nothing was drafted meanwhile, what is shown stays. */
  _speculation(now, then) {
    const of = (name) => now[name] - then[name];
    const judged = of("accepted_tokens") + of("misses");
    if (of("drafts")) set("acceptance", (1 + of("accepted_tokens") / of("drafts")).toFixed(2));
    if (of("drafts") && judged) set("hits", `${Math.round((100 * of("accepted_tokens")) / judged)} %`);
  }

  _when({ last_step_seconds_ago: ago, recovering }) {
    if (recovering) return `Recovering, then requests go on: ${recovering}`;
    if (this._working) return "Figures of the last three seconds";
    if (this._from) return `Idle; figures from ${clock(this._from)}`;
    if (ago === null) return "Nothing has run yet";
    return `Idle since ${clock(new Date(Date.now() - 1000 * ago))}; figures since the server's start`;
  }

  _memory(stats) {
    const { kv_slots: all, kv_used: used, kv_cached: cached } = stats;
    const share = (count) => `${all ? (100 * count) / all : 0}%`;
    byId("memory").querySelector(".used").style.width = share(used);
    byId("memory").querySelector(".cached").style.width = share(cached);
    const free = all - used - cached;
    for (const [id, count] of Object.entries({ used, cached, free })) set(id, count.toLocaleString("en"));
    byId("memory").setAttribute("aria-label", `KV memory: ${used} of ${all} tokens used, ${cached} cached`);
    set("guesses", stats.speculative_used.toLocaleString("en"));
    const asked = stats.prefix_cache_queries;
    set("prefix", asked ? `${Math.round((100 * stats.prefix_cache_hits) / asked)} %` : "–");
  }
}

function counted(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function set(id, words) {
  const element = byId(id);
  if (element.textContent !== words) element.textContent = words;
}
