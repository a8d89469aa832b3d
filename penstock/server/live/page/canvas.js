// What the pictures share: sharp pixels at any zoom, a new drawing when size or theme change, and words for what they show.

/** A canvas by its id. `draw` is called whenever its size or the theme has changed. */
export class Canvas {
  constructor(id, draw) {
    this._element = document.getElementById(id);
    this._description = new Description(this._element);
    new ResizeObserver(draw).observe(this._element);
    addEventListener("penstock-theme", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestAnimationFrame(draw));
  }

  /** CSS pixels. */
  get width() {
    return this._element.clientWidth;
  }

  /** Make it as wide as its place and `height` CSS pixels high; returns its context, cleared. */
  prepare(height) {
    const ratio = devicePixelRatio;
    const [wide, high] = [Math.round(this.width * ratio), Math.round(height * ratio)];
    if (this._element.width !== wide || this._element.height !== high) {
      this._element.width = wide;
      this._element.height = high;
      this._element.style.height = `${height}px`;
    }
    const context = this._element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, height);
    return context;
  }

  describe(words) {
    this._description.set(words);
  }
}

/** Say what a picture shows, at most once a second: it is for those who do not see it. */
export class Description {
  constructor(element) {
    this._element = element;
    this._at = -Infinity;
  }

  set(words) {
    if (performance.now() - this._at < 1000) return;
    this._at = performance.now();
    this._element.setAttribute("aria-label", words);
  }
}
