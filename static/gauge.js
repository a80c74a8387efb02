// The server's capacity, asked now and then; never while nobody looks.

import { ms } from "./lateness.js";

const EVERY_MS = 5_000;
const SLOWEST_MS = 60_000; // between questions that go unanswered
const LIMIT_MS = 4_000;
const MAX_PLACES = 32; // drawn one by one; more are a bar

const STATUS = {
  ready: "Server ready",
  starting: "Server starting",
  draining: "Server shutting down",
  failed: "Server failed",
};

export class Gauge {
  /** `parts`: elements `status`, `meter`, `places`, `words`, `late`, `kv`, `refused`; `onCapacity(capacity)`. */
  constructor({ url, getKey, parts, onCapacity }) {
    this.url = url;
    this.getKey = getKey;
    this.parts = parts;
    this.onCapacity = onCapacity;
    this.numFailed = 0;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.poll());
    this.poll();
  }

  /** Ask now, and then every few seconds. */
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    const turn = (this.turn = {});
    try {
      this.show(await this.ask());
      this.numFailed = 0;
    } catch (error) {
      this.numFailed++;
      this.showNothing(error.message === "key" ? "Needs a key" : "Server does not answer");
    }
    if (turn !== this.turn) return; // another poll began meanwhile
    this.timer = setTimeout(() => this.poll(), Math.min(SLOWEST_MS, EVERY_MS * 2 ** this.numFailed));
  }

  async ask() {
    const key = this.getKey();
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(this.url, { headers, cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
    if (response.status === 401) throw new Error("key");
    return response.json();
  }

  show(capacity) {
    const { active, cap, free, status, lateness, kv_cache: kv, refused } = capacity;
    this.setStatus(status, STATUS[status] ?? status);
    this.places(active, cap);
    const words = cap ? `${active} of ${cap} places taken` : "No places yet";
    this.parts.words.textContent = status === "ready" && cap && !free ? `${words}: full` : words;
    this.parts.meter.setAttribute("aria-valuemax", Math.max(cap, active, 1));
    this.parts.meter.setAttribute("aria-valuenow", active);
    this.parts.meter.setAttribute("aria-valuetext", `${words}, ${free} free`);
    this.parts.late.textContent = ms(lateness.p50_ms);
    this.parts.kv.textContent = kv ? `${Math.round(100 * kv.used_fraction)} %` : "–";
    this.parts.refused.textContent = Object.values(refused).reduce((a, b) => a + b, 0).toLocaleString("en");
    this.onCapacity(capacity);
  }

  showNothing(why) {
    this.setStatus("unknown", why);
    this.parts.words.textContent = why === "Needs a key" ? "Shown when a key is given" : "Unknown";
    for (const name of ["late", "kv", "refused"]) this.parts[name].textContent = "–";
    this.places(0, 0);
  }

  setStatus(status, words) {
    this.parts.status.dataset.status = status;
    if (this.parts.status.textContent !== words) this.parts.status.textContent = words;
  }

  places(active, cap) {
    const total = Math.max(active, cap);
    const isBar = total > MAX_PLACES;
    const num = isBar ? MAX_PLACES : Math.max(total, 1);
    const filled = isBar ? Math.round((active / total) * MAX_PLACES) : active;
    const list = this.parts.places;
    while (list.children.length > num) list.lastElementChild.remove();
    while (list.children.length < num) list.append(document.createElement("span"));
    [...list.children].forEach((place, i) => {
      place.className = i < filled ? (i < cap ? "taken" : "over") : "free";
    });
    list.classList.toggle("none", total === 0);
  }
}
