// One message of the conversation: who, text, a note below it, and buttons.

import { Markdown } from "./markdown.js";

/** What a text that is meant as Markdown has: a fence, a heading (one # is a comment), a list, bold words, a link. */
const MARKDOWN = /^ {0,3}(?:```|~~~)|^#{2,6} \S|^(?:[-*+]|\d+[.)]) \S|(?<![\w*(,])\*\*\w[^*\n]*(?<![\s,])\*\*(?![\w*])|\]\(https?:/m;
/** A chat message with such a line and no Markdown is code. */
const INDENTED = /^(?: {2,}|\t)\S/m;

const IN_POINTS = "Answered in points, which do not see each other: not the plain answer.";
const PLAIN = "Answered plainly.";
const [AS_ONE, AS_POINTS] = ["Answer plainly instead", "Answer in points instead"];

const ROLES = { You: "user", Text: "text" };

export class Message {
  /** `before` is text that is shown ahead of what is appended: a completion's prompt. */
  constructor(author, text = "", before = "") {
    this.author = author;
    this.role = ROLES[author] ?? "assistant";
    this.text = "";
    /** What the model thought before the text, which is neither copied nor sent back. */
    this.thoughts = "";
    this.before = before;
    this._chat = author !== "Text";
    this.element = made("article", before ? "message raw" : "message");
    const head = this.element.appendChild(made("div", "who"));
    head.appendChild(made("h3", "", author));
    this._actions = head.appendChild(made("div", "tools"));
    this.addAction("Copy", (button) => copy(this.before + this.text, button));
    this._body = this.element.appendChild(made("div", "body"));
    if (before) this._body.appendChild(made("span", "before", before));
    this._text = this._body.appendChild(made("div", "text"));
    this._markdown = this._thinking = null;
    this._points = this._cells = this._decision = this._inPoints = null;
    /** Why the answer ended before the model ended it, as a meter has it: `kind`, `words`, `tokens`. */
    this.ended = {};
    this._note = this.element.appendChild(made("p", "note"));
    this._end = this.element.appendChild(made("p", "end"));
    if (text) this.append(text);
  }

  /** A message as it is kept: plain data, of which `Message.of` makes it anew. */
  get record() {
    const { author, role, text, before, thoughts, ended } = this;
    const [decision, inPoints] = [this._decision?.firstChild.textContent ?? "", this._inPoints];
    return { author, role, text, before, thoughts, decision, inPoints, note: this._note.textContent, ended };
  }

  static of({ author, text, before = "", thoughts = "", decision = "", inPoints = null, note = "", ended = {} }) {
    const message = new Message(author, "", before);
    if (decision) message._decide(decision);
    message._inPoints = inPoints;
    if (thoughts) message.think(thoughts);
    if (text) message.append(text);
    message.note(note);
    message.tellEnd(ended);
    return message;
  }

  /** Thoughts stand above the answer, open until it begins. */
  think(piece) {
    if (!this._thinking) {
      this._thinking = made("details", "thoughts");
      this._thinking.open = true;
      this._thinking.append(made("summary", "", "Thoughts"), made("div", "body"));
      this._body.before(this._thinking);
    }
    this._thinking.lastChild.append(this.thoughts ? piece : piece.trimStart());
    this.thoughts += piece;
  }

  append(piece) {
    if (this._thinking && !this.text) this._thinking.open = false;
    const shown = /^\n*$/.test(this.text) && this._chat ? piece.replace(/^\n+/, "") : piece;
    this.text += piece;
    if (this._chat && MARKDOWN.test(this.text)) this._markdown ??= new Markdown(this._text);
    if (this._chat) this.element.classList.toggle("raw", INDENTED.test(this.text) && !this._markdown);
    if (this._markdown) this._markdown.show(this.text);
    else this._text.append(shown);
  }

  /** How an answer came about that was asked for in points, and the points themselves where there are any. */
  tellOutline({ used, reason, titles }) {
    this._inPoints = used;
    this._decide(`${used ? IN_POINTS : PLAIN} Why: ${reason}.`);
    if (used) this._openPoints(titles);
  }

  _decide(words) {
    this._decision = made("p", "decision", words);
    this._body.before(this._decision);
  }

  /** A button behind that decision: `act` hears the other value of outline_decoding. */
  offerOther(act) {
    if (this._inPoints === null) return;
    const button = this._decision?.appendChild(made("button", "quiet again", this._inPoints ? AS_ONE : AS_POINTS));
    button?.addEventListener("click", () => act(this._inPoints ? "off" : "on"));
  }

  /** The points of an answer grow side by side, in place of the text that is made of them. */
  _openPoints(titles) {
    this._points = this._body.appendChild(made("div", "points"));
    this._cells = titles.map((title, number) => {
      const cell = this._points.appendChild(made("section"));
      cell.appendChild(made("h4", "", `${number + 1}. ${title}`));
      return cell.appendChild(made("div", "point"));
    });
    this._text.hidden = true;
  }

  addToPoint(number, text) {
    const cell = this._cells?.[number];
    cell?.append(cell.textContent ? text : text.trimStart());
  }

  /** They stand below each other from now on, each as Markdown of its own: a list within one counts from 1. */
  closePoints() {
    this._points?.classList.add("told");
    for (const cell of this._cells ?? []) if (MARKDOWN.test(cell.textContent)) showMarkdown(cell);
  }

  note(words) {
    this._note.textContent = words;
  }

  tellEnd(ended) {
    this.ended = ended;
    this._end.textContent = ended.words ?? "";
  }

  /** A button behind those words: the reader's way on. */
  offerWayOn(label, act) {
    const button = this._end.appendChild(made("button", "quiet again", label));
    button.type = "button";
    button.addEventListener("click", act);
  }

  /** What the note's gain means, which is said once. */
  tellMeaning(words) {
    this._note.after(made("p", "meaning", words));
  }

  addAction(label, act) {
    const button = this._actions.appendChild(made("button", "quiet", label));
    button.type = "button";
    button.addEventListener("click", () => act(button));
  }
}

function showMarkdown(element) {
  const text = element.textContent;
  element.replaceChildren();
  new Markdown(element).show(text);
}

/** An error, said at once by a screen reader. */
export function notice(words) {
  const element = made("div", "notice");
  element.setAttribute("role", "alert");
  element.appendChild(made("p", "", words));
  return element;
}

function made(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // the clipboard's interface is there only for https and this host
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function copyBySelection(text) {
  const area = document.body.appendChild(made("textarea", "hidden"));
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}
