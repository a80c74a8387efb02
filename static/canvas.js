// What every drawing needs: a canvas as sharp as the screen, the page's colours, and no more frames than needed.

/** Redraws on the next frame after `ask()`, when it is resized and when the colours change. */
export class Drawing {
  /** `paint(context, width, height, colour)`, in CSS pixels; `colour("--name")` gives the page's. */
  constructor(canvas, paint) {
    this.canvas = canvas;
    this.paint = paint;
    this.frame = 0;
    new ResizeObserver(() => this.ask()).observe(canvas);
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) {
      matchMedia(query).addEventListener("change", () => this.ask());
    }
  }

  ask() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(this.canvas);
    this.paint(context, width, height, (name) => style.getPropertyValue(name).trim());
  }
}

export function wantsCalm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
