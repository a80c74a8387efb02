// The dial: a needle for how loud it is, yours while you have the floor, the answer's while it speaks.

import { Drawing, wantsCalm } from "./canvas.js";

const FLOOR_DB = -54;
const SPREAD = 0.92; // radians to either side of upright
const RISE = 0.5; // of the way to a louder level, each frame; falling is slower, as on a real one
const FALL = 0.09;

/** 0 to 1 over the range that speech has. */
export function loudness(rms) {
  if (rms <= 0) return 0;
  return Math.max(0, Math.min(1, (20 * Math.log10(rms) - FLOOR_DB) / -FLOOR_DB + 0.12));
}

export class Dial {
  /** `meter`: the element with role=meter that says the same in words. */
  constructor(canvas, meter) {
    this.meter = meter;
    this.levels = { you: 0, server: 0 };
    this.who = "idle";
    this.shown = 0;
    this.saidAt = 0;
    this.drawing = new Drawing(canvas, (...args) => this.paint(...args));
  }

  setFloor(who) {
    this.who = who;
    this.drawing.ask();
  }

  setLevel(whose, rms) {
    this.levels[whose] = loudness(rms);
    this.drawing.ask();
    if (whose === "you" && performance.now() - this.saidAt > 500) {
      this.saidAt = performance.now();
      this.meter.setAttribute("aria-valuenow", Math.round(100 * this.levels.you));
    }
  }

  silence() {
    this.levels = { you: 0, server: 0 };
    this.meter.setAttribute("aria-valuenow", 0);
    this.drawing.ask();
  }

  get target() {
    return this.who === "answering" && this.levels.server > 0 ? this.levels.server : this.levels.you;
  }

  paint(context, width, height, colour) {
    const target = this.target;
    const pull = wantsCalm() ? 1 : target > this.shown ? RISE : FALL;
    this.shown += (target - this.shown) * pull;
    const ink = { you: "--you", answering: "--server" }[this.who] ?? "--needle";
    const pivot = { x: width / 2, y: height - 8 };
    const radius = Math.min(height - 30, (width / 2 - 16) / Math.sin(SPREAD));
    paintScale(context, pivot, radius, this.shown, colour, colour(ink));
    paintWords(context, pivot, radius, colour("--muted"), this.drawing.canvas);
    paintNeedle(context, pivot, radius, this.shown, colour(ink), colour("--surface"));
    if (Math.abs(target - this.shown) > 0.002) this.drawing.ask();
  }
}

function at({ x, y }, radius, share) {
  const angle = (2 * share - 1) * SPREAD - Math.PI / 2;
  return [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
}

function paintScale(context, pivot, radius, level, colour, ink) {
  const num = 36;
  context.lineCap = "round";
  for (let i = 0; i <= num; i++) {
    const isLong = i % 6 === 0;
    const isPassed = level > 0.01 && i / num <= level;
    context.strokeStyle = isPassed ? ink : colour(isLong ? "--scale-strong" : "--scale");
    context.lineWidth = isLong ? 2.5 : 1.5;
    context.beginPath();
    context.moveTo(...at(pivot, radius + (isLong ? 0 : 5), i / num));
    context.lineTo(...at(pivot, radius + 15, i / num));
    context.stroke();
  }
}

function paintWords(context, pivot, radius, ink, canvas) {
  context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  context.fillStyle = ink;
  context.textBaseline = "top";
  for (const [share, word] of [[0, "quiet"], [1, "loud"]]) {
    const [x, y] = at(pivot, radius + 20, share);
    context.textAlign = "center";
    context.fillText(word, x, y + 14);
  }
}

function paintNeedle(context, pivot, radius, level, ink, surface) {
  const tip = at(pivot, radius - 8, level);
  context.strokeStyle = ink;
  context.lineWidth = 2.5;
  context.beginPath();
  context.moveTo(pivot.x, pivot.y);
  context.lineTo(...tip);
  context.stroke();
  const [x, y] = at(pivot, radius * 0.62, level); // the weight of the pendulum
  context.fillStyle = ink;
  context.beginPath();
  context.arc(x, y, 8, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = surface;
  context.beginPath();
  context.arc(x, y, 3, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = ink;
  context.beginPath();
  context.arc(pivot.x, pivot.y, 5, 0, 2 * Math.PI);
  context.fill();
}
