// The frames of the last few seconds of work: counts become rates.

const SECONDS = 3;

export class Window {
  constructor() {
    this._frames = [];
  }

  clear() {
    this._frames = [];
  }

  /**
   * Take the newest frame's stats; returns the oldest ones that are kept, and how long ago they were (seconds). Once work
   * has begun, the idle time before it is forgotten: it would make every rate too low.
   */
  add({ at, stats }) {
    this._frames.push({ at, stats });
    while (this._frames.length > 2 && at - this._frames[1].at > SECONDS) this._frames.shift();
    if (stats.running) this._frames = this._frames.slice(this._frames.findLastIndex((frame) => !frame.stats.running) + 1);
    return { then: this._frames[0].stats, seconds: at - this._frames[0].at };
  }
}
