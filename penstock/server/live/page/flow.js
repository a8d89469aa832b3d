// When each stage worked, on what: a lane per stage, time to the right. A full pipeline is a tight weave; one that waits
// for every token shows a thin staircase. It stands still while nothing happens.

import { Canvas } from "./canvas.js";
import { clock } from "./clock.js";
import { colours } from "./theme.js";

const LABEL = 22;
const AXIS = 18;
const LANE_GAP = 3;
const ROOMY = 440;
const STEPS = 40;
const STEPS_PER_STAGE = 5;
const SHORTEST = 0.4;
const LONGEST = 8;
const KEPT = 600;
const LEAST_COMMITTED = 0.45;

export class Flow {
  constructor() {
    this._canvas = new Canvas("flow", () => this._draw());
    this._stages = 0;
    this._batches = [];
    this._span = 1;
    this._until = null;
  }

  setup({ stages }) {
    this._stages = stages.length;
    this._batches = [];
    this._span = 1;
    this._until = null;
    this._draw();
  }

  frame({ passed, stats }) {
    const until = stats.running ? null : this._until ?? clock(new Date());
    if (!passed.length && until === this._until) return;
    this._until = until;
    this._batches = [...this._batches, ...passed].slice(-KEPT);
    this._span = this._fitting();
    this._draw();
    this._canvas.describe(`When each stage worked in the last ${this._span.toFixed(1)} seconds`);
  }

  /** Seconds in which some forty steps of the slowest stage fit, more if there are many stages; doubled or halved. */
  _fitting() {
    const spans = this._batches.slice(-40).flatMap((batch) => batch.spans.filter((span) => span.rows));
    const lengths = spans.map((span) => span.end - span.start).sort((a, b) => a - b);
    const length = lengths[Math.floor(0.75 * lengths.length)] ?? SHORTEST;
    const wanted = Math.max(STEPS, STEPS_PER_STAGE * this._stages) * length;
    return 2 ** Math.round(Math.log2(Math.min(LONGEST, Math.max(SHORTEST, wanted))));
  }

  _draw() {
    if (!this._stages) return;
    const lane = this._stages > 8 ? 9 : 16;
    const { width } = this._canvas;
    const context = this._canvas.prepare(this._stages * (lane + LANE_GAP) + AXIS);
    const end = Math.max(0, ...this._batches.flatMap(({ spans }) => spans.map((span) => span.end)));
    const scale = (width - LABEL) / this._span;
    const place = (time) => width - (end - time) * scale;
    this._drawLanes(context, width, lane);
    for (const batch of this._batches) {
      for (const span of batch.spans) {
        if (!span.rows || span.end < end - this._span) continue;
        const x = Math.max(LABEL, place(span.start));
        drawBar(context, batch, x, span.stage * (lane + LANE_GAP), Math.max(1, place(span.end) - x - 1), lane);
      }
    }
  }

  _drawLanes(context, width, lane) {
    const { muted, well, font } = colours();
    context.font = `11px ${font}`;
    context.textBaseline = "middle";
    for (let i = 0; i < this._stages; i++) {
      const y = i * (lane + LANE_GAP);
      context.fillStyle = well;
      context.fillRect(LABEL, y, width - LABEL, lane);
      context.fillStyle = muted;
      context.textAlign = "left";
      if (lane > 10 || i % 2 === 0) context.fillText(`${i}`, 0, y + lane / 2 + 0.5);
    }
    if (!this._batches.length) return;
    const y = this._stages * (lane + LANE_GAP) + AXIS / 2;
    const span = this._span >= 1 ? `${this._span} s` : `${Math.round(1000 * this._span)} ms`;
    context.fillText(`${span} ${this._until ? "earlier" : "ago"}`, LABEL, y);
    context.textAlign = "center";
    if (width > ROOMY) context.fillText("when each stage worked; pale: on wrong guesses", (LABEL + width) / 2, y);
    context.textAlign = "right";
    context.fillText(this._until ?? "now", width, y);
  }
}

/**
 * A batch on a stage, its height shared by what its rows were. A single committed one among dozens of guesses is what
 * the batch was sent for: it takes a good part of the height.
 */
function drawBar(context, { committed, speculated, dead }, x, y, width, height) {
  const palette = colours();
  const all = committed + speculated + dead || 1;
  const sure = committed ? Math.max(LEAST_COMMITTED * height, (height * committed) / all) : 0;
  const lost = all > committed ? ((height - sure) * dead) / (all - committed) : 0;
  context.fillStyle = palette.speculated;
  context.fillRect(x, y + lost, width, height - lost);
  context.fillStyle = palette.wasted;
  context.fillRect(x, y, width, lost);
  context.fillStyle = palette.committed;
  context.fillRect(x, y + height - sure, width, sure);
}
