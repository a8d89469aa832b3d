// What both canvases need: sharp pixels at any zoom, and a new drawing when size or theme change.

/** Make `canvas` as wide as its place and `height` CSS pixels high; returns its cleared context and its width. */
export function prepare(canvas, height) {
  const ratio = devicePixelRatio;
  const width = canvas.clientWidth;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

export function whenChanged(canvas, draw) {
  new ResizeObserver(draw).observe(canvas);
  addEventListener("penstock-theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestAnimationFrame(draw));
}

/** Say what a picture shows, at most once a second: it is for those who do not see it. */
export class Description {
  constructor(element) {
    this._element = element;
    this._at = 0;
  }

  set(words) {
    if (performance.now() - this._at < 1000) return;
    this._at = performance.now();
    this._element.setAttribute("aria-label", words);
  }
}
