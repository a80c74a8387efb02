// Lateness of the session's ticks over the last minute, against the budget. Bounded, as the session is.

import { Drawing, wantsCalm } from "./canvas.js";

export const SPAN_S = 60;
export const MAX_POINTS = 600;

/** The newest points, oldest first; never more than `MAX_POINTS`, never older than `SPAN_S`. */
export class Recent {
  constructor() {
    this.points = [];
  }

  push(timeS, latenessMs) {
    this.points.push({ timeS, latenessMs });
    if (this.points.length > MAX_POINTS) this.points.shift();
  }

  forget(nowS) {
    while (this.points.length && this.points[0].timeS < nowS - SPAN_S) this.points.shift();
  }

  /** {last, median, worst} in ms, or null when there is nothing. */
  figures() {
    if (!this.points.length) return null;
    const sorted = this.points.map((point) => point.latenessMs).sort((a, b) => a - b);
    return { last: this.points.at(-1).latenessMs, median: sorted[sorted.length >> 1], worst: sorted.at(-1) };
  }
}

export class LatenessPlot {
  /** `figures`: elements by the names `last`, `median`, `worst`. */
  constructor(canvas, figures, clock = () => performance.now() / 1000) {
    this.canvas = canvas;
    this.figures = figures;
    this.clock = clock;
    this.recent = new Recent();
    this.budgetMs = this.targetMs = null;
    this.drawing = new Drawing(canvas, (...args) => this.paint(...args));
    setInterval(() => this.recent.points.length && this.show(), wantsCalm() ? 2000 : 250);
  }

  setScale({ budgetMs, targetMs }) {
    this.budgetMs = budgetMs ?? this.budgetMs;
    this.targetMs = targetMs ?? this.targetMs;
    this.drawing.ask();
  }

  push(latenessMs) {
    this.recent.push(this.clock(), latenessMs);
    this.show();
  }

  show() {
    this.recent.forget(this.clock());
    const found = this.recent.figures();
    for (const name of ["last", "median", "worst"]) this.figures[name].textContent = ms(found?.[name]);
    this.canvas.setAttribute("aria-label", describe(found, this.budgetMs));
    if (!document.hidden) this.drawing.ask();
  }

  paint(context, width, height, colour) {
    const budget = this.budgetMs ?? 2000;
    const top = 1.15 * Math.max(budget, ...this.recent.points.map((point) => point.latenessMs));
    const area = { left: 0, right: width - 1, top: 6, bottom: height - 18 };
    const y = (value) => area.bottom - (Math.min(value, top) / top) * (area.bottom - area.top);
    const nowS = this.clock();
    const x = (timeS) => area.right - ((nowS - timeS) / SPAN_S) * (area.right - area.left);
    context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    paintTime(context, area, colour);
    if (this.targetMs) paintLine(context, area, y(this.targetMs), `target ${ms(this.targetMs)}`, colour("--muted"), [2, 4]);
    paintLine(context, area, y(budget), `budget ${ms(budget)}`, colour("--alarm"), []);
    for (const { timeS, latenessMs } of this.recent.points) {
      const isOver = latenessMs > budget;
      context.strokeStyle = context.fillStyle = colour(isOver ? "--alarm" : "--server");
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x(timeS), area.bottom);
      context.lineTo(x(timeS), y(latenessMs));
      context.stroke();
      context.beginPath();
      context.arc(x(timeS), y(latenessMs), 3.5, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

function paintTime(context, area, colour) {
  context.fillStyle = colour("--muted");
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(area.left, area.bottom + 0.5);
  context.lineTo(area.right, area.bottom + 0.5);
  context.stroke();
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillText(`${SPAN_S} s ago`, area.left, area.bottom + 5);
  context.textAlign = "right";
  context.fillText("now", area.right, area.bottom + 5);
}

function paintLine(context, area, y, label, ink, dash) {
  context.strokeStyle = context.fillStyle = ink;
  context.lineWidth = 1;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(area.left, Math.round(y) + 0.5);
  context.lineTo(area.right, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.textAlign = "left";
  context.textBaseline = "bottom";
  context.fillText(label, area.left, y - 2);
}

function describe(found, budgetMs) {
  if (!found) return "Lateness plot: nothing in the last minute.";
  return (
    `Lateness in the last minute: last ${ms(found.last)}, median ${ms(found.median)}, worst ${ms(found.worst)}; ` +
    `the budget is ${ms(budgetMs)}.`
  );
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10_000 ? `${(value / 1000).toFixed(1)} s` : `${Math.round(value).toLocaleString("en")} ms`;
}
