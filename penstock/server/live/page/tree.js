// The draft tree, growing to the right: the committed tokens, then the guesses, the favourite on top. A node stands at the
// column of its position in the text, and the picture moves left as the text grows, so that the deepest guess is in sight.
// What is pruned fades where it was.

import { Description } from "./canvas.js";
import { clock } from "./clock.js";

const NS = "http://www.w3.org/2000/svg";
const ROW = 22;
const ROWS = 9;
const PILL = 18;
const WIDE = { own: 82, others: 44 };
const NARROW = { own: 66, others: 34 };
const NARROW_BELOW = 480;
const CHARACTER = 6.7;
const JUMP = 4;
const NO_DRAFTER = "Nothing is guessed: the server was started without a drafter.";
const NOTES = { drafter: "no guess yet", none: "no drafter" };

export class Tree {
  constructor() {
    this._svg = document.getElementById("tree");
    this._panel = document.getElementById("tree-panel");
    this._note = document.getElementById("tree-note");
    this._empty = document.getElementById("tree-empty");
    this._welcome = this._empty.textContent;
    this._description = new Description(this._svg);
    this._camera = this._svg.appendChild(make("g", { class: "camera" }));
    this._ghosts = this._camera.appendChild(make("g", { class: "ghosts" }));
    this._now = this._camera.appendChild(make("g", {}));
    this._drawn = new Map();
    this._tree = null;
    this._first = this._column = NaN;
    new ResizeObserver(() => this._tree && this._draw(this._tree)).observe(document.getElementById("tree-frame"));
  }

  setup({ strategy }) {
    const drafts = strategy !== "autoregressive";
    this._empty.textContent = drafts ? this._welcome : NO_DRAFTER;
    this._empty.hidden = false;
    this._note.textContent = drafts ? NOTES.drafter : NOTES.none;
    this._panel.open = false;
    this._tree = null;
    this._until = null;
    this._drawn = new Map();
    for (const group of [this._ghosts, this._now]) group.replaceChildren();
    this._svg.setAttribute("aria-label", "Draft tree: none");
  }

  frame({ tree }) {
    this._svg.classList.toggle("past", tree === null);
    if (tree === null) {
      this._until ??= clock(new Date());
      if (this._tree) this._note.textContent = `the last one, from ${this._until}`;
      return;
    }
    if (!this._tree && !tree.size) return; // nothing has been guessed so far: the panel stays folded
    this._until = null;
    this._panel.open ||= !this._tree;
    this._empty.hidden = true;
    this._draw(tree);
  }

  _draw(tree) {
    const last = this._tree;
    this._tree = tree;
    const width = document.getElementById("tree-frame").clientWidth;
    if (!width) return this._say(tree, 0);
    const kind = tree.own ? "own" : "others";
    const column = (width < NARROW_BELOW ? NARROW : WIDE)[kind];
    const columns = Math.max(3, Math.floor(width / column));
    const behind = Math.max(0, Math.min(tree.path.length - 1, Math.floor(columns / 4)));
    const layout = layOut(tree);
    this._fade(last, tree, column);
    this._svg.setAttribute("viewBox", `0 0 ${width} ${ROWS * ROW}`);
    // A tree that is deeper than the picture is wide is seen from its other end.
    const end = tree.position + layout.deepest + 1;
    this._look(Math.max(tree.position - behind, end - columns), end - columns, column);
    this._drawn = this._place(tree, layout, behind, column);
    this._now.replaceChildren(...edges(this._drawn, column), ...[...this._drawn.values()].map((node) => pill(node, column)));
    this._say(tree, layout.hidden);
  }

  /**
   * Have column `first` at the left edge. The picture slides there by a few columns, and only if nothing of it is out of
   * sight meanwhile, that is, if no column before `least` was at the edge: at a high speed it would slide all the time.
   */
  _look(first, least, column) {
    const far = this._column !== column || this._first < least || Math.abs(first - this._first) > JUMP;
    [this._first, this._column] = [first, column];
    this._camera.classList.toggle("jumps", far);
    this._camera.style.transform = `translateX(${-first * column}px)`;
  }

  /** Every node that is drawn, by id: its column is its position in the text. */
  _place(tree, { rows }, behind, column) {
    const drawn = new Map();
    const path = tree.path.slice(-(behind + 1));
    path.forEach((step, i) => {
      const at = tree.position - (path.length - 1 - i);
      drawn.set(step.node, { ...step, at, row: 0, state: step.hit ? "committed" : "missed", parent: path[i - 1]?.node });
    });
    for (const leaf of tree.leaves) {
      if (!rows.has(leaf.node)) continue;
      drawn.set(leaf.node, { ...leaf, at: tree.position + leaf.depth, row: rows.get(leaf.node) });
    }
    return drawn;
  }

  /** What was drawn and is neither live nor committed any more goes out slowly, unless the text has jumped ahead. */
  _fade(last, tree, column) {
    if (last?.request !== tree.request || tree.position - last.position > JUMP) {
      this._ghosts.replaceChildren();
      return;
    }
    const kept = new Set([...tree.path, ...tree.leaves].map(({ node }) => node));
    for (const node of this._drawn.values()) {
      if (kept.has(node.node) || node.at <= last.position) continue;
      const place = `${node.at} ${node.row}`;
      this._ghosts.querySelector(`[data-place="${place}"]`)?.remove();
      const ghost = this._ghosts.appendChild(pill({ ...node, state: "pruned" }, column));
      ghost.dataset.place = place;
      ghost.addEventListener("animationend", () => ghost.remove());
    }
  }

  _say(tree, hidden) {
    const count = `${tree.size} guess${tree.size === 1 ? "" : "es"}`;
    const left = tree.size - tree.leaves.length + hidden;
    const words = [...(tree.own ? [] : ["another request, its words hidden"]), count + (left ? `, ${left} not drawn` : "")];
    this._note.textContent = words.join(" · ");
    const levels = Math.max(0, ...tree.leaves.map(({ depth }) => depth));
    this._description.set(`Draft tree of ${tree.own ? "your" : "another"} request: ${count} on ${levels} levels`);
  }
}

/** Rows for as many of the best nodes as fit: a first child stands in its parent's row, each further one below. */
function layOut({ root, leaves }) {
  const children = new Map([[root, []]]);
  let used = 1;
  let hidden = 0;
  let deepest = 0;
  for (const leaf of leaves) {
    const siblings = children.get(leaf.parent);
    if (!siblings || (siblings.length && used === ROWS)) {
      hidden++;
      continue;
    }
    if (siblings.length) used++;
    deepest = Math.max(deepest, leaf.depth);
    siblings.push(leaf.node);
    children.set(leaf.node, []);
  }
  const rows = new Map();
  let row = 0;
  const walk = (node) => {
    rows.set(node, row);
    children.get(node).forEach((child, i) => {
      if (i) row++;
      walk(child);
    });
  };
  walk(root);
  return { rows, hidden, deepest };
}

function edges(drawn, column) {
  const found = [];
  for (const node of drawn.values()) {
    const parent = drawn.get(node.parent);
    if (!parent) continue;
    const [x1, y1] = [parent.at * column + column / 2, middle(parent.row)];
    const [x2, y2] = [node.at * column, middle(node.row)];
    const bend = x2 - 4;
    const d = y1 === y2 ? `M${x1} ${y1}H${x2 + 4}` : `M${x1} ${y1}H${bend - 6}Q${bend} ${y1} ${bend} ${y1 + 6}V${y2 - 6}Q${bend} ${y2} ${bend + 6} ${y2}H${x2 + 6}`;
    found.push(make("path", { d, class: `edge ${node.state.replace(" ", "-")}` }));
  }
  return found;
}

function pill(node, column) {
  const words = node.text === null ? "" : visible(node.text, Math.floor((column - 20) / CHARACTER));
  const width = node.text === null ? PILL - 2 : column - 10;
  const [x, y] = [node.at * column + (column - width) / 2, middle(node.row) - PILL / 2];
  const group = make("g", { class: `node ${node.state.replace(" ", "-")}`, transform: `translate(${x} ${y})` });
  group.appendChild(make("rect", { width, height: PILL, rx: node.text === null ? PILL / 2 : 5 }));
  if (words) group.appendChild(make("text", { x: width / 2, y: PILL / 2 + 0.5 })).textContent = words;
  return group;
}

function middle(row) {
  return row * ROW + ROW / 2;
}

/** A token's text on one line: blanks that matter are visible. */
function visible(text, most) {
  const flat = text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  const trimmed = flat.trim() || "␣".repeat(Math.min(flat.length, most));
  return trimmed.length > most ? `${trimmed.slice(0, most - 1)}…` : trimmed;
}

function make(name, attributes) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
