// The conversation: turns, streaming, stop, errors. In "chat" mode turns go to /v1/chat/completions; in "complete" mode
// a text goes to /v1/completions and its continuation is written behind it.

import { ApiError, events, post } from "./api.js";
import { Message, notice } from "./messages.js";
import { Settings } from "./settings.js";

const log = document.getElementById("log");
const empty = document.getElementById("empty");
const form = document.getElementById("composer");
const prompt = document.getElementById("prompt");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const modes = document.querySelectorAll("input[name=mode]");
/** What has been said, by mode. */
const talks = { chat: document.createElement("div"), complete: document.createElement("div") };
const PLACEHOLDERS = { chat: "Message the model", complete: "The beginning of a text" };
const EMPTY = "The model's first token was an end token: it has nothing to add. Ask in other words.";
const TITLES = { chat: "New chat", complete: "New text" };

let settings, model, onRequest;
/** What a chat samples with where nothing is set. */
let chatSampling = {};
let turns = [];
let running = null;

/** `model` asks for the served model's name, `sampling` for what its chats sample with; `onRequest` hears the id of every request before it is sent. */
export function startChat(options) {
  settings = new Settings(document.getElementById("settings"));
  ({ model, onRequest } = options);
  options.sampling().then(useSampling).catch(show);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  stop.addEventListener("click", () => running?.abort());
  document.getElementById("new").addEventListener("click", () => {
    clear();
    prompt.focus();
  });
  for (const one of modes) one.addEventListener("change", () => setMode(one.value));
  setMode(localStorage.getItem("penstock-mode") ?? "chat");
}

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

function setMode(value) {
  const chosen = value in PLACEHOLDERS ? value : "chat";
  for (const one of modes) one.checked = one.value === chosen;
  localStorage.setItem("penstock-mode", chosen);
  prompt.placeholder = PLACEHOLDERS[chosen];
  document.getElementById("new").textContent = TITLES[chosen];
  useSampling();
  running?.abort();
  showTalk();
}

/** A text is continued with the model's own defaults. */
function useSampling(found = chatSampling) {
  chatSampling = found;
  settings.useDefaults(mode() === "chat" ? chatSampling : {});
}

function clear() {
  running?.abort();
  if (mode() === "chat") turns = [];
  talk().replaceChildren();
  showTalk();
}

function talk() {
  return talks[mode()];
}

function showTalk() {
  const shown = talk().hasChildNodes() ? talk() : empty;
  if (shown.parentNode !== log) log.replaceChildren(shown);
  log.scrollTop = log.scrollHeight;
}

function submit() {
  const text = prompt.value;
  if (running || !text.trim()) return;
  prompt.value = "";
  for (const old of talk().querySelectorAll(".notice")) old.remove();
  if (mode() === "chat") ask(text);
  else complete(text);
  showTalk();
}

/** `outline` says whether the answer comes in points, as the request's fields. */
async function ask(text, outline = settings.outline) {
  const here = talk();
  for (const old of here.querySelectorAll(".again")) old.remove();
  const question = here.appendChild(new Message("You", text).element);
  const answer = new Message(await model().catch(() => "Model"));
  here.append(answer.element);
  const system = settings.system;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: text }];
  const mine = turns; // of this chat, should another one have begun meanwhile
  const sent = await generate("v1/chat/completions", { messages, ...outline }, answer);
  if (!sent) return takeBack(text, question, answer.element);
  mine.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
  answer.offerOther((other) => {
    if (running || mine !== turns) return;
    mine.splice(-2);
    question.remove();
    answer.element.remove();
    ask(text, { outline_decoding: other });
  });
}

async function complete(text) {
  const message = new Message("Text", "", text);
  talk().append(message.element);
  const sent = await generate("v1/completions", { prompt: text }, message);
  if (sent) message.addAction("Continue", () => !running && complete(text + message.text));
  else takeBack(text, message.element);
}

function takeBack(text, ...elements) {
  for (const element of elements) element.remove();
  prompt.value ||= text;
  showTalk();
}

/** Stream one answer into `message`. False if the server refused it or nothing of it came. */
async function generate(path, body, message) {
  const id = newId();
  begin(message);
  const meter = new Meter();
  let ended = null;
  try {
    const all = { model: await model(), stream: true, stream_options: { include_usage: true }, ...settings.body, ...body };
    onRequest(id);
    const response = await post(path, all, { "X-Request-Id": id }, running.signal);
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
      meter.take(chunk);
      ended = chunk.choices[0]?.finish_reason ?? ended;
      const { delta, text: continued } = chunk.choices[0] ?? {};
      const piece = delta?.content ?? continued;
      if (chunk.outline) keepAtEnd(() => message.tellOutline(chunk.outline));
      for (const { point, text } of chunk.outline_points ?? []) keepAtEnd(() => message.addToPoint(point, text));
      if (delta?.reasoning_content || piece) meter.begin();
      if (delta?.reasoning_content) keepAtEnd(() => message.think(delta.reasoning_content));
      if (piece) keepAtEnd(() => message.append(piece));
    }
    keepAtEnd(() => message.note(ended === "stop" && !message.text ? EMPTY : meter.words()));
    return true;
  } catch (error) {
    if (error.name === "AbortError") keepAtEnd(() => message.note("stopped"));
    else show(error);
    return message.text !== "" || message.thoughts !== "";
  } finally {
    end(message);
  }
}

function begin(message) {
  running = new AbortController();
  send.hidden = true;
  stop.hidden = false;
  log.setAttribute("aria-busy", "true");
  message.element.classList.add("writing");
  log.scrollTop = log.scrollHeight;
}

/** The log stays at its end while it grows, for who has not scrolled back to read. */
function keepAtEnd(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function end(message) {
  running = null;
  message.element.classList.remove("writing");
  keepAtEnd(() => message.closePoints());
  log.setAttribute("aria-busy", "false");
  const atStop = document.activeElement === stop;
  stop.hidden = true;
  send.hidden = false;
  if (atStop || document.activeElement === document.body) prompt.focus();
}

function show(error) {
  const element = notice(error instanceof ApiError ? error.message : "The server cannot be reached.");
  if (mode() === "chat" && /template/i.test(error.message)) {
    const button = element.appendChild(document.createElement("button"));
    button.textContent = "Complete texts instead";
    button.addEventListener("click", () => setMode("complete"));
  }
  talk().append(element);
  showTalk();
}

/** An id that nobody guesses: whoever knows it may watch the request's tokens. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `page-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** What an answer took: counted by the server, timed here, where the reader waits. */
class Meter {
  constructor() {
    this.started = performance.now();
    this.first = null;
    this._usage = null;
    this._metrics = null;
  }

  /** The first of the answer is here. */
  begin() {
    this.first ??= performance.now();
  }

  take({ usage, metrics }) {
    this._usage = usage ?? this._usage;
    this._metrics = metrics ?? this._metrics;
  }

  words() {
    if (!this._usage || this.first === null) return "";
    const tokens = this._usage.completion_tokens;
    const seconds = (performance.now() - this.started) / 1000;
    const words = [
      `${tokens} token${tokens === 1 ? "" : "s"}`,
      `${(tokens / seconds).toFixed(1)} per second`,
      `first after ${((this.first - this.started) / 1000).toFixed(2)} s`,
    ];
    if (this._metrics?.num_drafts) words.push(`acceptance length ${this._metrics.mean_acceptance_length.toFixed(1)}`);
    return words.join(" · ");
  }
}
