// What is said below an answer: what it took, its gain over plain decoding, and why it ended where the model did not end
// it. Tokens are counted by the server and timed here, where the reader waits.

const SAME = "Guesses change the speed alone: the text is the one that plain decoding gives, token for token";
/** What exactness means, by the server's numerics. */
export const MEANINGS = {
  exact: `${SAME}.`,
  fast: `${SAME}, unless rounding decides between two that are nearly tied.`,
};
export const EMPTY = "The model's first token was an end token: it has nothing to add. Ask in other words.";
const BY_ITSELF = [null, "stop", "tool_calls"];

export class Meter {
  constructor() {
    this.started = performance.now();
    this.first = null;
    this._usage = null;
    this._metrics = null;
    this._reason = null;
  }

  /** The first of the answer is here. */
  begin() {
    this.first ??= performance.now();
  }

  take({ usage, metrics, choices }) {
    this._usage = usage ?? this._usage;
    this._metrics = metrics ?? this._metrics;
    this._reason = choices[0]?.finish_reason ?? this._reason;
  }

  /** Whether the model itself ended the answer. */
  get stopped() {
    return this._reason === "stop";
  }

  /** Speed over that of plain decoding; null where the server does not know it. */
  get gain() {
    return this._metrics?.speed_up ?? null;
  }

  words() {
    if (!this._usage || this.first === null) return "";
    const tokens = this._usage.completion_tokens;
    const seconds = (performance.now() - this.started) / 1000;
    const words = [`${tokens} token${tokens === 1 ? "" : "s"}`, `${(tokens / seconds).toFixed(1)} per second`];
    if (this.gain !== null) words.push(`${this.gain.toFixed(1)} times plain`);
    words.push(`first after ${((this.first - this.started) / 1000).toFixed(2)} s`);
    if (this._metrics?.num_drafts) words.push(`acceptance length ${this._metrics.mean_acceptance_length.toFixed(1)}`);
    return words.join(" · ");
  }

  /** `longest` is the most tokens that prompt and answer may have together. Null where the model ended the answer. */
  end(longest) {
    if (BY_ITSELF.includes(this._reason)) return null;
    const { prompt_tokens: prompt, completion_tokens: tokens } = this._usage ?? {};
    if (this._reason !== "length") return { kind: "early", words: `Ended early: ${this._reason}.` };
    if (prompt + tokens >= longest) return { kind: "full", words: `The context is full: ${longest} tokens; begin anew.` };
    const at = tokens ? `${tokens} tokens` : "the limit on tokens";
    return { kind: "cut", words: `Cut at ${at}; Max tokens, in Settings, allows more.`, tokens };
  }
}
