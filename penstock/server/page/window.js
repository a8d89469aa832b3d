// The frames of the last few seconds: counts become rates.

const SECONDS = 3;

export class Window {
  constructor() {
    this._frames = [];
  }

  clear() {
    this._frames = [];
  }

  /** Take the newest frame's stats; returns the oldest ones that are kept, and how long ago they were (seconds). */
  add({ at, stats }) {
    this._frames.push({ at, stats });
    while (this._frames.length > 2 && at - this._frames[1].at > SECONDS) this._frames.shift();
    return { then: this._frames[0].stats, seconds: at - this._frames[0].at };
  }
}
