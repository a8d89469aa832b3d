// The stages side by side, and in each the batch that it works on: a square per token. Batches move from stage to stage.

import { calm, colours } from "./theme.js";
import { Canvas } from "./canvas.js";
import { Window } from "./window.js";

const GAP = 12;
const LINE_GAP = 12;
const NARROWEST = 62;
const HEAD = 22;
const WELL = 66;
const FOOT = 20;
const PAD = 8;
const USUAL_ROWS = 32;
const EASE_MS = 28;

export class Pipeline {
  constructor() {
    this._canvas = new Canvas("pipeline", () => this._draw());
    this._window = new Window();
    this._stages = [];
    this._busy = [];
    this._blocks = new Map();
    this._moving = 0;
  }

  setup({ stages }) {
    this._stages = stages;
    this._busy = stages.map(() => 0);
    this._blocks.clear();
    this._window.clear();
    this._draw();
  }

  frame(frame) {
    const { then, seconds } = this._window.add(frame);
    const { stage_busy_seconds: now } = frame.stats;
    if (seconds > 0.3) this._busy = now.map((busy, i) => Math.min(1, (busy - then.stage_busy_seconds[i]) / seconds));
    if (!frame.stats.running) this._busy = now.map(() => 0);
    this._take(frame.flying.filter((batch) => batch.stage >= 0));
    const inside = frame.flying.map((batch) => `${batch.rows} in stage ${Math.max(batch.stage, 0)}`);
    this._canvas.describe(`Pipeline, tokens: ${inside.join(", ") || "none, idle"}`);
    this._move();
  }

  /** Batches that are new come in, those that are gone go out, unless all of them are new: then nothing can be followed. */
  _take(batches) {
    const seen = new Set(batches.map((batch) => batch.stream));
    const follows = batches.some((batch) => this._blocks.has(batch.stream));
    for (const [stream, block] of this._blocks) {
      if (seen.has(stream)) continue;
      if (follows) block.fade = 0;
      else this._blocks.delete(stream);
    }
    for (const batch of batches) {
      const known = this._blocks.get(batch.stream);
      const block = known ?? { at: batch.stage, alpha: follows ? 0 : 1 };
      this._blocks.set(batch.stream, Object.assign(block, { to: batch.stage, fade: 1, batch }));
    }
  }

  _move() {
    cancelAnimationFrame(this._moving);
    let last = performance.now();
    const step = (now) => {
      const passed = Math.max(0, now - last); // the first picture's time may be before this call
      const share = calm.matches ? 1 : 1 - Math.exp(-passed / EASE_MS);
      last = now;
      if (this._ease(share)) this._moving = requestAnimationFrame(step);
      this._draw();
    };
    this._moving = requestAnimationFrame(step);
  }

  _ease(share) {
    let moving = false;
    for (const [stream, block] of this._blocks) {
      block.at += share * (block.to - block.at);
      block.alpha += share * (block.fade - block.alpha);
      if (block.fade === 0 && block.alpha < 0.05) this._blocks.delete(stream);
      else moving ||= Math.abs(block.to - block.at) > 0.005 || Math.abs(block.fade - block.alpha) > 0.02;
    }
    return moving;
  }

  _draw() {
    if (!this._stages.length) return;
    const { width } = this._canvas;
    const most = Math.max(1, Math.floor((width + GAP) / (NARROWEST + GAP)));
    const lines = Math.ceil(this._stages.length / most);
    const across = Math.ceil(this._stages.length / lines);
    const high = HEAD + WELL + FOOT;
    const context = this._canvas.prepare(lines * high + (lines - 1) * LINE_GAP);
    const wide = (width - (across - 1) * GAP) / across;
    this._place = (at) => {
      const line = Math.min(lines - 1, Math.max(0, Math.floor((at + 0.5) / across)));
      return { x: (at - line * across) * (wide + GAP), y: line * (high + LINE_GAP) };
    };
    this._stages.forEach((stage, i) => this._drawStage(context, stage, i, wide));
    for (const block of this._blocks.values()) drawBlock(context, block, this._place(block.at), wide);
    for (const block of this._blocks.values()) if (block.fade) drawCount(context, block, this._place(block.to), wide);
    context.globalAlpha = 1;
  }

  _drawStage(context, stage, i, wide) {
    const { ink, muted, line, well, font } = colours();
    const { x, y } = this._place(i);
    context.globalAlpha = 1;
    context.fillStyle = well;
    context.strokeStyle = line;
    context.beginPath();
    context.roundRect(x + 0.5, y + HEAD + 0.5, wide - 1, WELL - 1, 6);
    context.fill();
    context.stroke();
    context.textBaseline = "middle";
    context.font = `600 12px ${font}`;
    context.fillStyle = ink;
    context.textAlign = "left";
    context.fillText(`${i}`, x, y + HEAD / 2);
    context.font = `12px ${font}`;
    context.fillStyle = muted;
    const share = `${Math.round(100 * this._busy[i])} %`;
    const busy = wide > 150 ? `${share} busy` : share;
    const room = wide - 16 - context.measureText(busy).width - 10;
    context.fillText(shortened(context, stage.name || stage.host || layersOf(stage), room), x + 16, y + HEAD / 2);
    context.textAlign = "right";
    context.fillText(busy, x + wide, y + HEAD / 2);
    if (i + 1 < this._stages.length && this._place(i + 1).y === y) drawArrow(context, x + wide, y + HEAD + WELL / 2);
  }
}

/** As much of a name as there is room for; nothing of it where a few letters would be left. */
function shortened(context, name, room) {
  if (context.measureText(name).width <= room) return name;
  const fits = Math.floor((name.length * room) / context.measureText(name).width) - 1;
  return fits < 4 ? "" : `${name.slice(0, fits)}…`;
}

function layersOf({ first, last }) {
  return `layers ${first}–${last - 1}`;
}

function drawArrow(context, x, y) {
  context.strokeStyle = colours().muted;
  context.lineWidth = 1.25;
  context.beginPath();
  context.moveTo(x + GAP / 2 - 2, y - 4);
  context.lineTo(x + GAP / 2 + 2, y);
  context.lineTo(x + GAP / 2 - 2, y + 4);
  context.stroke();
  context.lineWidth = 1;
}

function drawBlock(context, { batch, alpha }, { x, y }, wide) {
  const [left, top, inner, high] = [x + PAD, y + HEAD + PAD, wide - 2 * PAD, WELL - 2 * PAD];
  const unit = unitFor(Math.max(USUAL_ROWS, batch.cells.length), inner, high);
  const across = Math.floor((inner + unit * 0.2) / unit);
  context.globalAlpha = alpha;
  [...batch.cells].forEach((kind, i) => {
    drawCell(context, kind, left + (i % across) * unit, top + Math.floor(i / across) * unit, unit * 0.8);
  });
}

/** Below the stage where the batch is, not beside the batch as it moves: two counts never meet. */
function drawCount(context, { batch, alpha }, { x, y }, wide) {
  const { muted, font } = colours();
  context.globalAlpha = alpha;
  context.font = `12px ${font}`;
  context.fillStyle = muted;
  context.textAlign = "left";
  const words = wide > 110 ? `${batch.rows} token${batch.rows === 1 ? "" : "s"}` : `${batch.rows}`;
  context.fillText(words, x, y + HEAD + WELL + FOOT / 2);
}

/** The largest square, its gap included, of which `count` fit. */
function unitFor(count, width, height) {
  for (let unit = 13; unit > 4; unit -= 0.5) {
    if (Math.floor((width + unit * 0.2) / unit) * Math.floor((height + unit * 0.2) / unit) >= count) return unit;
  }
  return 4;
}

function drawCell(context, kind, x, y, size) {
  const { committed, speculated, dead } = colours();
  if (kind === "d") {
    context.strokeStyle = dead;
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    context.beginPath();
    context.moveTo(x + 1.5, y + size - 1.5);
    context.lineTo(x + size - 1.5, y + 1.5);
    context.stroke();
    return;
  }
  context.fillStyle = kind === "c" ? committed : speculated;
  context.fillRect(x, y, size, size);
}
