// What has been said, one chat or text each, and its copy in this browser: one entry of localStorage for each, so that
// several tabs do not overwrite each other's. None of it leaves the browser but with the request that asks for an answer.

import { Message } from "./messages.js";

const PREFIX = "penstock-chat-";
const MOST_KEPT = 30;
/** Characters of all kept chats together: browsers give a site about five million. */
const MOST_CHARACTERS = 1_000_000;
const TITLE_LENGTH = 40;

/** A chat's messages, or the pieces of one text, in their order. `mode` is "chat" or "complete". */
export class Talk {
  constructor(mode, { id = newId(), messages = [] } = {}) {
    this.mode = mode;
    this.id = id;
    this.messages = [];
    /** Whether it is not to be kept any more. */
    this.forgotten = false;
    this.element = document.createElement("div");
    for (const record of messages) this.add(Message.of(record));
  }

  add(message) {
    this.messages.push(message);
    this.element.append(message.element);
    return message;
  }

  remove(...gone) {
    this.messages = this.messages.filter((message) => !gone.includes(message));
    for (const { element } of gone) element.remove();
  }

  /** As the API has them. What a model thought is not sent back. */
  get turns() {
    return this.messages.map(({ role, text }) => ({ role, content: text }));
  }

  /** Keep a copy in this browser; the chats that changed longest ago make room. */
  keep() {
    if (this.forgotten || !this.messages.length) return;
    const records = this.messages.map((message) => message.record);
    // An answer goes with its question, so that the turns still alternate.
    const step = this.mode === "chat" ? 2 : 1;
    const text = () => JSON.stringify({ mode: this.mode, at: Date.now(), messages: records });
    while (text().length > MOST_CHARACTERS) records.splice(0, step);
    let room = MOST_CHARACTERS - text().length;
    const others = keptTalks().filter(({ id }) => id !== this.id);
    others.forEach(({ id, size }, number) => {
      room -= size;
      if (room < 0 || number >= MOST_KEPT - 1) localStorage.removeItem(PREFIX + id);
    });
    try {
      localStorage.setItem(PREFIX + this.id, text());
    } catch {
      localStorage.removeItem(PREFIX + this.id); // the browser gives less room: this chat is then not kept
    }
  }
}

/** The kept chats, the one that changed last first. */
export function keptTalks() {
  const found = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map(read);
  return found.filter((talk) => talk !== null).sort((one, other) => other.at - one.at);
}

export function forgetTalks() {
  for (const key of Object.keys(localStorage)) if (key.startsWith(PREFIX)) localStorage.removeItem(key);
}

/** A kept chat's first words, on one line. */
export function titleOf({ messages }) {
  const words = (messages[0].text || messages[0].before).replace(/\s+/g, " ").trim();
  return words.length > TITLE_LENGTH ? `${words.slice(0, TITLE_LENGTH - 1)}…` : words;
}

/** An id that nobody guesses: whoever knows a request's may watch its tokens. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Null for what another version of the page, or somebody else, has written there. */
function read(key) {
  const text = localStorage.getItem(key);
  try {
    const { mode, at, messages } = JSON.parse(text);
    const usable = messages.length && messages.every(({ role, text: said }) => role && typeof said === "string");
    return usable ? { id: key.slice(PREFIX.length), mode, at, messages, size: text.length } : null;
  } catch {
    return null;
  }
}
