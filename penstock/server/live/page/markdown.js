// The Markdown that chat models write, as elements: headings, lists, quotes and fenced code, and within lines bold and
// italic words, code and links. Elements are made one by one: what a model writes is never taken for the page's markup.

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) +(\S.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(\S.*)$/;
const QUOTE = /^ {0,3}> ?/;
const INLINE =
  /(?<ticks>`+)(?<code>.+?)\k<ticks>(?!`)|\*\*(?<strong>[^\s*](?:[^*\n]*[^\s*])?)\*\*|(?<![\w*])\*(?<em>[^\s*](?:[^*\n]*[^\s*])?)\*(?![\w*])|\[(?<words>[^\]\n]+)\]\((?<link>https?:[^\s)]+)\)/g;
/** Lists and quotes within one another; what is deeper stays text. */
const DEEPEST = 8;

/** A text that grows: of its blocks only those are made anew that have changed, so that a selection above them stays. */
export class Markdown {
  constructor(element) {
    this._element = element;
    this._shown = [];
    element.replaceChildren();
  }

  show(text) {
    const blocks = blocksOf(text);
    const sources = blocks.map(({ kind, lines }) => `${kind}\n${lines.join("\n")}`);
    let same = 0;
    while (same < this._shown.length && this._shown[same] === sources[same]) same++;
    while (this._element.childNodes.length > same) this._element.lastChild.remove();
    this._element.append(...blocks.slice(same).map((block) => elementOf(block, 0)));
    this._shown = sources;
  }
}

/** Runs of lines by what they are: "fence", "heading", "list", "quote" or "paragraph". */
function blocksOf(text) {
  const blocks = [];
  let open = null;
  let blank = false;
  const begin = (kind, line) => blocks.push((open = { kind, lines: [line] }));
  for (const line of text.split("\n")) {
    if (open?.kind === "fence") {
      const end = FENCE.exec(line)?.[1].startsWith(FENCE.exec(open.lines[0])[1]);
      if (end) open = null;
      else open.lines.push(line);
      continue;
    }
    if (!line.trim()) {
      blank = true;
      continue;
    }
    const kind = kindOf(line);
    const goesOn = open?.kind === "list" ? kind === "list" || /^ {2,}\S/.test(line) : !blank && open?.kind === kind;
    if (goesOn && kind !== "heading") open.lines.push(...(blank ? ["", line] : [line]));
    else begin(kind, line);
    blank = false;
  }
  return blocks;
}

function kindOf(line) {
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (ITEM.test(line)) return "list";
  return QUOTE.test(line) ? "quote" : "paragraph";
}

function elementOf({ kind, lines }, depth) {
  if (kind === "fence") return codeBlock(lines.slice(1).join("\n"));
  if (kind === "heading") return heading(HEADING.exec(lines[0]));
  if (kind === "list" && depth < DEEPEST) return list(lines, depth);
  if (kind === "quote" && depth < DEEPEST) {
    const inner = blocksOf(lines.map((line) => line.replace(QUOTE, "")).join("\n"));
    return filled("blockquote", inner.map((block) => elementOf(block, depth + 1)));
  }
  return filled("p", inline(lines.join("\n")));
}

function codeBlock(text) {
  const element = document.createElement("pre");
  element.appendChild(document.createElement("code")).textContent = text;
  return element;
}

function heading([, hashes, words]) {
  const element = filled("h4", inline(words.replace(/ +#+ *$/, "")));
  element.dataset.level = hashes.length;
  return element;
}

/** Items begin at the first one's column; what stands further right is an item's own. */
function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length < indent.length + 2) items.push({ column: line.length - found[3].length, lines: [found[3]] });
    else items.at(-1).lines.push(line.slice(Math.min(items.at(-1).column, line.search(/\S|$/))));
  }
  const ordered = /\d/.test(mark);
  const element = filled(ordered ? "ol" : "ul", items.map((item) => listItem(item.lines, depth)));
  if (ordered) element.start = parseInt(mark, 10);
  return element;
}

function listItem(lines, depth) {
  const [first, ...rest] = blocksOf(lines.join("\n"));
  const head = first.kind === "paragraph" ? inline(first.lines.join("\n")) : [elementOf(first, depth + 1)];
  return filled("li", [...head, ...rest.map((block) => elementOf(block, depth + 1))]);
}

function inline(text) {
  const parts = [];
  let done = 0;
  for (const { 0: all, index, groups } of text.matchAll(INLINE)) {
    parts.push(text.slice(done, index), marked(groups));
    done = index + all.length;
  }
  return [...parts, text.slice(done)].filter((part) => part !== "");
}

function marked({ code, strong, em, words, link }) {
  if (code !== undefined) return filled("code", [code]);
  if (strong !== undefined) return filled("strong", inline(strong));
  if (em !== undefined) return filled("em", inline(em));
  const element = filled("a", [words]);
  element.href = link;
  element.target = "_blank";
  element.rel = "noopener noreferrer";
  return element;
}

function filled(tag, parts) {
  const element = document.createElement(tag);
  element.append(...parts);
  return element;
}
