// Requests to this server: the API key, error messages, and server-sent events read with fetch (which, other than
// EventSource, can send headers and can be stopped).

const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");
const wrong = document.getElementById("key-refused");
let asking = null;

/** What a server says when it refuses a request. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** fetch with the key; asks for one, as often as it takes, when the server answers 401. Throws ApiError. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("penstock-key");
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(response.status, await messageOf(response));
    await askForKey(key);
  }
}

export function post(path, body, headers, signal) {
  const all = { "Content-Type": "application/json", ...headers };
  return call(path, { method: "POST", headers: all, body: JSON.stringify(body), signal });
}

/** Yields {event, data} for every server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const parsed = eventOf(block);
        if (parsed.data) yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  const found = { event: "message", data: "" };
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^(event|data): ?(.*)$/.exec(line) ?? [];
    if (name === "event") found.event = value;
    if (name === "data") found.data += (found.data && "\n") + value;
  }
  return found;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? (typeof body.detail === "string" ? body.detail : text);
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

/** Resolves once there is another key than the one that was refused. Several askers share one dialog. */
function askForKey(refused) {
  if (sessionStorage.getItem("penstock-key") !== refused) return Promise.resolve();
  asking ??= new Promise((resolve) => {
    field.value = "";
    wrong.hidden = refused === null;
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      if (field.value) sessionStorage.setItem("penstock-key", field.value);
      resolve();
    }, { once: true });
  });
  return asking;
}
