// The panel for what went wrong: title, what to do, buttons, and a countdown where the page tries again by itself.

export class ProblemView {
  /** `parts`: elements `panel`, `title`, `text`, `steps`, `countdown`, `retry`, `cancel`. */
  constructor(parts, { onRetry, onCancel }) {
    this.parts = parts;
    this.timer = 0;
    parts.retry.addEventListener("click", onRetry);
    parts.cancel.addEventListener("click", onCancel);
  }

  /** `retryAt`: of performance.now(); null: nothing happens by itself. `retryLabel`: null for no button. */
  show({ title, text, steps = [] }, { tone = "alarm", retryAt = null, retryLabel = null, canDismiss = true }) {
    const { panel, retry, cancel } = this.parts;
    panel.dataset.tone = tone;
    this.parts.title.textContent = title;
    this.parts.text.textContent = text;
    this.parts.steps.replaceChildren(...steps.map((step) => Object.assign(document.createElement("li"), { textContent: step })));
    this.parts.steps.hidden = steps.length === 0;
    retry.hidden = retryLabel === null;
    retry.textContent = retryLabel ?? "";
    cancel.hidden = !canDismiss;
    panel.hidden = false;
    this.count(retryAt);
  }

  hide() {
    clearInterval(this.timer);
    this.parts.panel.hidden = true;
  }

  count(retryAt) {
    clearInterval(this.timer);
    this.parts.countdown.hidden = retryAt === null;
    if (retryAt === null) return;
    const show = () => {
      const seconds = Math.max(0, Math.ceil((retryAt - performance.now()) / 1000));
      this.parts.countdown.textContent = seconds ? `Trying again in ${seconds} s` : "Trying again";
    };
    show();
    this.timer = setInterval(show, 250);
  }
}
