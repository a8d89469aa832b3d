// Recent requests: a line each with its timeline, the longest one as wide as the column.

const ROWS = 8;
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
    const longest = Math.max(...shown.map((one) => (one.ended_at ?? at) - one.queued_at), 0.001);
    body.replaceChildren(...shown.map((one) => this._row(one, at, longest)));
  }

  _row(one, at, longest) {
    const row = document.createElement("tr");
    const end = one.ended_at ?? at;
    const first = one.first_token_at;
    const seconds = first === null ? 0 : end - first;
    const name = row.appendChild(document.createElement("th"));
    name.scope = "row";
    name.textContent = `${one.number + 1}${this._own.has(one.number) ? " · yours" : ""}`;
    row.appendChild(timeline(one, end, longest));
    row.appendChild(cell(first === null ? "–" : duration(first - one.queued_at)));
    row.appendChild(cell(`${one.tokens}`));
    row.appendChild(cell(one.tokens > 1 && seconds > 0 ? ((one.tokens - 1) / seconds).toFixed(1) : "–"));
    row.appendChild(cell(one.finish_reason ?? (one.started_at === null ? "waiting" : "running")));
    return row;
  }
}

function timeline(one, end, longest) {
  const holder = document.createElement("td");
  const started = one.started_at ?? end;
  const first = one.first_token_at ?? end;
  const parts = { queued: started - one.queued_at, prefill: first - started, decode: end - first };
  const bar = holder.appendChild(document.createElement("div"));
  bar.className = "stack slim";
  bar.setAttribute("role", "img");
  const words = { queued: "queued", prefill: "prompt", decode: "tokens" };
  bar.setAttribute("aria-label", Object.keys(parts).map((kind) => `${words[kind]} ${duration(parts[kind])}`).join(", "));
  for (const [kind, seconds] of Object.entries(parts)) {
    const piece = bar.appendChild(document.createElement("i"));
    piece.className = kind;
    piece.style.width = `${Math.max(0, (100 * seconds) / longest)}%`;
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
