// Recent requests: a line each with its timeline. All bars have one scale, and one that would be much longer than the
// others is cut off: it would leave no width to them.

const ROWS = 6;
/** What fits into the column, in the middle one's length. */
const MOST_OF_MIDDLE = 4;
const body = document.getElementById("requests");
const none = body.firstElementChild;

export class Requests {
  constructor() {
    this._own = new Set();
  }

  setup() {
    this._own.clear();
    body.replaceChildren(none);
  }

  frame({ at, requests, own }) {
    for (const number of own) this._own.add(number);
    const shown = requests.slice(0, ROWS);
    if (!shown.length) return;
    const lengths = shown.map((one) => (one.ended_at ?? at) - one.queued_at).sort((a, b) => a - b);
    const middle = lengths[Math.floor((lengths.length - 1) / 2)];
    const scale = Math.max(0.001, Math.min(lengths.at(-1), MOST_OF_MIDDLE * middle));
    body.replaceChildren(...shown.map((one) => this._row(one, at, scale)));
  }

  _row(one, at, scale) {
    const row = document.createElement("tr");
    const end = one.ended_at ?? at;
    const first = one.first_token_at;
    const seconds = first === null ? 0 : end - first;
    const name = row.appendChild(document.createElement("th"));
    name.scope = "row";
    name.textContent = `${one.number + 1}${this._own.has(one.number) ? " · yours" : ""}`;
    row.appendChild(timeline(one, end, scale));
    row.appendChild(cell(first === null ? "–" : duration(first - one.queued_at)));
    row.appendChild(cell(`${one.tokens}`));
    row.appendChild(cell(one.tokens > 1 && seconds > 0 ? ((one.tokens - 1) / seconds).toFixed(1) : "–"));
    row.appendChild(cell(one.finish_reason ?? (one.started_at === null ? "waiting" : "running")));
    return row;
  }
}

/** `scale`: the seconds that fill the column. */
function timeline(one, end, scale) {
  const holder = document.createElement("td");
  const started = one.started_at ?? end;
  const first = one.first_token_at ?? end;
  const parts = { queued: started - one.queued_at, prefill: first - started, decode: end - first };
  const bar = holder.appendChild(document.createElement("div"));
  const length = end - one.queued_at;
  bar.className = length > scale ? "stack slim cut" : "stack slim";
  bar.setAttribute("role", "img");
  const words = { queued: "queued", prefill: "prompt", decode: "tokens" };
  bar.setAttribute("aria-label", Object.keys(parts).map((kind) => `${words[kind]} ${duration(parts[kind])}`).join(", "));
  for (const [kind, seconds] of Object.entries(parts)) {
    const piece = bar.appendChild(document.createElement("i"));
    piece.className = kind;
    piece.style.width = `${Math.max(0, (100 * seconds) / Math.max(scale, length))}%`;
  }
  return holder;
}

function cell(words) {
  const made = document.createElement("td");
  made.textContent = words;
  return made;
}

function duration(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}
