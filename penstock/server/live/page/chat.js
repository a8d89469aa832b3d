// The conversation: turns, streaming, stop, errors. In "chat" mode turns go to /v1/chat/completions; in "complete" mode
// a text goes to /v1/completions and its continuation is written behind it.

import { ApiError, events, post } from "./api.js";
import { Message, notice } from "./messages.js";
import { EMPTY, MEANINGS, Meter } from "./meter.js";
import { Settings } from "./settings.js";
import { Talk, forgetTalks, keptTalks, newId, titleOf } from "./talks.js";

const log = document.getElementById("log");
const empty = document.getElementById("empty");
const form = document.getElementById("composer");
const prompt = document.getElementById("prompt");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const earlier = document.getElementById("earlier");
const modes = document.querySelectorAll("input[name=mode]");
const PLACEHOLDERS = { chat: "Message the model", complete: "The beginning of a text" };
const TITLES = { chat: "New chat", complete: "New text" };
const EARLIER = "Earlier";
const FORGET = "Forget all chats and texts that this browser has kept from this server?";
const LEFT = "cut off: the page was left";

/** What is shown, by mode: this tab's own, after a reload too. */
const talks = { chat: opened("chat"), complete: opened("complete") };
let settings, served, onRequest;
/** What a chat samples with where nothing is set. */
let chatSampling = {};
let running = null;
/** The message that is being written. */
let writing = null;

/** `options.served` asks for the model's card, `schema` for the API's description; `onRequest` hears the id of every
 * request before it is sent. */
export function startChat(options) {
  settings = new Settings(document.getElementById("settings"));
  Object.values(talks).forEach(offerActions);
  ({ served, onRequest } = options);
  useCard(options.schema).catch(show);
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
    open(new Talk(mode()));
    prompt.focus();
  });
  document.getElementById("forget").addEventListener("click", forget);
  earlier.addEventListener("change", openEarlier);
  window.addEventListener("storage", listEarlier); // another tab has kept one
  window.addEventListener("pagehide", keepWriting);
  for (const one of modes) one.addEventListener("change", () => setMode(one.value));
  setMode(localStorage.getItem("penstock-mode") ?? "chat");
}

async function useCard(schema) {
  const card = await served();
  useSampling(card.chat_sampling);
  // Without the schema nothing is checked here: the server refuses what is wrong.
  const openapi = await schema().catch(() => ({}));
  settings.useSchema(openapi, card.max_model_len);
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
  listEarlier();
}

/** A text is continued with the model's own defaults. */
function useSampling(found = chatSampling) {
  chatSampling = found;
  settings.useDefaults(mode() === "chat" ? chatSampling : {});
}

// ------------------------------------------------------------------------------------------------------------- talks

/** The talk that this tab showed before a reload, or a new one. */
function opened(mode) {
  const id = sessionStorage.getItem(`penstock-open-${mode}`);
  return new Talk(mode, keptTalks().find((kept) => kept.id === id));
}

function talk() {
  return talks[mode()];
}

function open(talk) {
  running?.abort();
  talks[talk.mode] = talk;
  sessionStorage.setItem(`penstock-open-${talk.mode}`, talk.id);
  offerActions(talk);
  showTalk();
  listEarlier();
}

/** The buttons of what was kept, as they were when it came. */
function offerActions(talk) {
  for (const message of talk.messages) offerContinuation(talk, message);
  offerAgain(talk);
}

function openEarlier() {
  const kept = keptTalks().find(({ id }) => id === earlier.value);
  if (kept) open(new Talk(kept.mode, kept));
  else listEarlier();
}

/** The kept talks of this mode but the one that is shown. */
function listEarlier() {
  const others = keptTalks().filter((kept) => kept.mode === mode() && kept.id !== talk().id);
  earlier.hidden = !others.length;
  earlier.replaceChildren(new Option(EARLIER, ""), ...others.map((kept) => new Option(titleOf(kept), kept.id)));
}

function keep(talk) {
  talk.keep();
  if (talk === talks[talk.mode]) sessionStorage.setItem(`penstock-open-${talk.mode}`, talk.id);
  listEarlier();
}

/** Keep what has come of an answer while the page is left in the middle of it. */
function keepWriting() {
  if (!writing?.text) return;
  writing.note(LEFT);
  Object.values(talks).find(({ messages }) => messages.includes(writing))?.keep();
}

function forget() {
  if (!confirm(FORGET)) return;
  running?.abort();
  forgetTalks();
  for (const one of Object.keys(talks)) {
    talks[one].forgotten = true; // its answer may still be ending
    talks[one] = new Talk(one);
  }
  showTalk();
  listEarlier();
}

function showTalk() {
  const shown = talk().element.hasChildNodes() ? talk().element : empty;
  if (shown.parentNode !== log) log.replaceChildren(shown);
  log.scrollTop = log.scrollHeight;
}

// ----------------------------------------------------------------------------------------------------------- requests

function submit() {
  const text = prompt.value;
  if (running || !text.trim()) return;
  prompt.value = "";
  for (const old of talk().element.querySelectorAll(".notice")) old.remove();
  if (mode() === "chat") ask(talk(), text);
  else complete(talk(), text);
  showTalk();
}

/** `outline` says whether the answer comes in points, as the request's fields. */
async function ask(talk, text, outline = settings.outline) {
  for (const old of talk.element.querySelectorAll(".again")) old.remove();
  const turns = talk.turns;
  const question = talk.add(new Message("You", text));
  const answer = talk.add(new Message(await served().then(({ id }) => id, () => "Model")));
  const system = settings.system;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: text }];
  const came = await generate("v1/chat/completions", { messages, ...outline }, answer);
  if (!came) return takeBack(talk, text, question, answer);
  offerAgain(talk, outline);
  keep(talk);
}

/** Below a chat's last answer: to have it in the other way, and the way on where it was cut. */
function offerAgain(talk, outline) {
  if (talk.mode !== "chat" || talk.messages.length < 2) return;
  const [question, answer] = talk.messages.slice(-2);
  const again = (changed) => {
    if (running || talk !== talks.chat) return;
    talk.remove(question, answer);
    ask(talk, question.text, changed);
    showTalk();
  };
  answer.offerOther((other) => again({ outline_decoding: other }));
  const { kind, tokens } = answer.ended;
  if (kind === "full") answer.offerWayOn("New chat", () => open(new Talk("chat")));
  if (kind === "cut" && tokens) {
    answer.offerWayOn(`Answer with up to ${2 * tokens} tokens`, () => {
      settings.set("max_tokens", 2 * tokens);
      again(outline);
    });
  }
}

async function complete(talk, text) {
  const message = talk.add(new Message("Text", "", text));
  if (!(await generate("v1/completions", { prompt: text }, message))) return takeBack(talk, text, message);
  offerContinuation(talk, message);
  keep(talk);
}

function offerContinuation(talk, message) {
  if (talk.mode !== "complete") return;
  message.addAction("Continue", () => !running && complete(talk, message.before + message.text));
}

function takeBack(talk, text, ...messages) {
  talk.remove(...messages);
  offerAgain(talk);
  prompt.value ||= text;
  showTalk();
}

/** Stream one answer into `message`. False if the server refused it or nothing of it came. */
async function generate(path, body, message) {
  const id = `page-${newId()}`;
  begin(message);
  const meter = new Meter();
  try {
    const card = await served();
    const all = { model: card.id, stream: true, stream_options: { include_usage: true }, ...settings.body, ...body };
    onRequest(id);
    const response = await post(path, all, { "X-Request-Id": id }, running.signal);
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
      meter.take(chunk);
      take(chunk, message, meter);
    }
    const end = meter.end(card.max_model_len);
    keepAtEnd(() => {
      message.note(meter.stopped && !message.text ? EMPTY : meter.words());
      if (end) message.tellEnd(end);
      if (meter.gain !== null) tellMeaning(message, card.numerics);
    });
    return true;
  } catch (error) {
    if (error.name === "AbortError") keepAtEnd(() => message.note("stopped"));
    else show(error);
    return message.text !== "" || message.thoughts !== "";
  } finally {
    end(message);
  }
}

function take(chunk, message, meter) {
  const { delta, text: continued } = chunk.choices[0] ?? {};
  const piece = delta?.content ?? continued;
  if (chunk.outline) keepAtEnd(() => message.tellOutline(chunk.outline));
  for (const { point, text } of chunk.outline_points ?? []) keepAtEnd(() => message.addToPoint(point, text));
  if (delta?.reasoning_content || piece) meter.begin();
  if (delta?.reasoning_content) keepAtEnd(() => message.think(delta.reasoning_content));
  if (piece) keepAtEnd(() => message.append(piece));
}

/** What exactness means is said below the first answer that has a gain, once in this browser. */
function tellMeaning(message, numerics) {
  if (localStorage.getItem("penstock-meaning") === numerics || !(numerics in MEANINGS)) return;
  localStorage.setItem("penstock-meaning", numerics);
  message.tellMeaning(MEANINGS[numerics]);
}

function begin(message) {
  running = new AbortController();
  writing = message;
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
  running = writing = null;
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
  talk().element.append(element);
  showTalk();
}
