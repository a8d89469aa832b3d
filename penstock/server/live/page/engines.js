// Several engines as rows: each with its state, its stages and its requests. One engine alone has no rows.

/** Seconds over which a stage's share of work is shown. */
const OVER = 1.5;
/** Seconds for which a request is remembered that is on no engine. */
const REMEMBERED = 10;
/** How a state is said, and in which colour. */
const STATES = {
  up: ["up", "good"],
  starting: ["restarting", "wait"],
  silent: ["silent", "bad"],
  draining: ["draining", "wait"],
  down: ["down", "bad"],
};

const panel = document.getElementById("engines-panel");
const list = document.getElementById("engines");
const title = document.getElementById("pipeline-title");

export class Engines {
  constructor() {
    this._seen = [];
    /** Request key -> the engine that it is on, and the one that it came from if it has moved. */
    this._homes = new Map();
  }

  setup() {
    this._seen = [];
    this._homes.clear();
  }

  frame({ at, engines }) {
    panel.hidden = engines.length < 2;
    title.textContent = engines.length < 2 ? "Pipeline" : "Pipeline of engine 0";
    this._settle(engines, at);
    this._seen = [...this._seen.filter((one) => at - one.at < OVER), { at, engines }];
    const before = this._seen[0];
    while (list.children.length > engines.length) list.lastChild.remove();
    for (const [i, engine] of engines.entries()) {
      const row = list.children[i] ?? list.appendChild(document.createElement("li"));
      this._draw(row, engine, shares(engine, before.engines[i], at - before.at));
    }
  }

  /** Note where each request is now. */
  _settle(engines, at) {
    const homes = new Map();
    for (const { engine, requests } of engines) {
      for (const { key } of requests) {
        const last = this._homes.get(key);
        const from = last === undefined ? null : last.engine === engine ? last.from : last.engine;
        homes.set(key, { engine, from, at });
      }
    }
    // One that waits for another engine is on none meanwhile.
    for (const [key, home] of this._homes) if (!homes.has(key) && at - home.at < REMEMBERED) homes.set(key, home);
    this._homes = homes;
  }

  _draw(row, { engine, state, reason, requests, waiting, moved, restarts }, busy) {
    const [words, kind] = STATES[state];
    const notes = [`${requests.length} request${requests.length === 1 ? "" : "s"}`];
    if (waiting) notes.push(`${waiting} waiting`);
    if (moved) notes.push(`${moved} moved away`);
    if (restarts) notes.push(`restarted ${restarts} time${restarts === 1 ? "" : "s"}`);
    row.dataset.engine = engine;
    row.replaceChildren(
      part("span", "name", `Engine ${engine}`),
      part("span", `state ${kind}`, words),
      group("stages", "Share of time that each stage has computed for", busy.map((share, i) => this._stage(share, i))),
      group("requests", "Requests on this engine", requests.map((one) => this._request(one))),
      part("span", "notes", notes.join(" · ")),
    );
    if (reason) row.append(part("span", "reason", reason));
  }

  _stage(share, i) {
    const box = part("i", "stage", "");
    const fill = box.appendChild(part("i", "", ""));
    fill.style.height = `${Math.round(100 * share)}%`;
    box.title = `Stage ${i}: busy for ${Math.round(100 * share)} % of the time`;
    return box;
  }

  _request({ key, own }) {
    const { from } = this._homes.get(key);
    const square = part("i", `request${own ? " own" : ""}${from === null ? "" : " moved"}`, "");
    square.title = [own ? "your request" : "a request", ...(from === null ? [] : [`moved here from engine ${from}`])].join(", ");
    return square;
  }
}

/** For each stage the share of the time for which it has computed. */
function shares({ busy }, before, seconds) {
  return busy.map((now, i) => (seconds > 0 && before ? Math.min(1, Math.max(0, now - (before.busy[i] ?? now)) / seconds) : 0));
}

function part(tag, name, text) {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

function group(name, label, members) {
  const made = part("span", name, "");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", `${label}: ${members.map((one) => one.title).join("; ") || "none"}`);
  made.append(...members);
  return made;
}
