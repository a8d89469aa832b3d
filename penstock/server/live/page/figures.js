// The figures above the picture, and the KV memory. Rates are differences of two frames' counts.

import { Window } from "./window.js";

const byId = (id) => document.getElementById(id);

export class Figures {
  constructor() {
    this._window = new Window();
  }

  setup({ strategy, drafter, stages, emulated }) {
    const how = strategy === "autoregressive" ? "no speculation" : `${strategy} strategy, ${drafter.replaceAll("_", " ")} drafter`;
    const split = `${stages.length} stage${stages.length === 1 ? "" : "s"}`;
    byId("setup").textContent = [split, how, ...(emulated ? ["emulated devices"] : [])].join(" · ");
    byId("setup").title = emulated ?? "";
    this._window.clear();
  }

  frame(frame) {
    const { stats } = frame;
    const { then, seconds } = this._window.add(frame);
    this._speed(stats, then, seconds);
    this._speculation(stats, then);
    set("queue", `${stats.running}, ${stats.waiting}`);
    this._memory(stats);
  }

  _speed(now, then, seconds) {
    const tokens = now.generation_tokens - then.generation_tokens;
    if (tokens > 0 && seconds > 0.3) set("speed", (tokens / seconds).toFixed(1));
    else if (!now.running) set("speed", "–");
  }

  /** Of the last seconds; while nothing is drafted, since the start. */
  _speculation(now, then) {
    const base = now.drafts > then.drafts ? then : null;
    const of = (name) => now[name] - (base ? base[name] : 0);
    const judged = of("accepted_tokens") + of("misses");
    set("acceptance", now.drafts ? (1 + of("accepted_tokens") / of("drafts")).toFixed(2) : "–");
    set("hits", judged ? `${Math.round((100 * of("accepted_tokens")) / judged)} %` : "–");
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

function set(id, words) {
  const element = byId(id);
  if (element.textContent !== words) element.textContent = words;
}
