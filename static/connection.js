// One conversation's socket: opens it, says who is calling, watches that it lives, comes back when it was lost.

import { endingOf } from "./endings.js";

const OPEN_LIMIT_MS = 10_000;
const PING_EVERY_MS = 10_000;
const MAX_UNANSWERED = 2; // pings: the network is gone, though no one said so. Hidden tabs ping more seldom.
const STEADY_MS = 5_000; // a session that lived so long was no failed attempt
const MAX_WAITING_S = 1; // audio that waits in the socket; more is dropped, since late audio helps nobody

/**
 * States: `idle`, `connecting`, `live` (has `session`), `waiting` (has `ending` and `retryAt`), `ended` (has `ending`).
 * `onState(state)`, `onEvent(event)`, `onSound(event, pcm)`: the last for `response.audio` and its samples.
 */
export class Connection {
  constructor({ url, getKey, onState, onEvent, onSound }) {
    this.url = url;
    this.getKey = getKey;
    this.on = { onState, onEvent, onSound };
    this.state = { name: "idle" };
    this.numDropped = 0; // frames
    this.roundTripMs = null;
    this.attempt = 0;
    this.timers = [];
    addEventListener("online", () => this.state.name === "waiting" && this.retryNow());
  }

  get isLive() {
    return this.state.name === "live" && this.socket.readyState === WebSocket.OPEN; // it may be closing
  }

  /** `query`: an object; `sample_rate` is needed. */
  start(query) {
    this.query = query;
    this.attempt = 0;
    this.connect();
  }

  retryNow() {
    if (this.state.name === "waiting" || this.state.name === "ended") this.connect();
  }

  /** The person ended it, or gave up waiting. */
  stop() {
    this.drop();
    this.enter({ name: "idle" });
  }

  send(message) {
    if (this.isLive) this.socket.send(JSON.stringify(message));
  }

  /** False when it was dropped. */
  sendAudio(pcm) {
    if (!this.isLive) return false;
    const limit = 2 * this.query.sample_rate * MAX_WAITING_S;
    if (this.socket.bufferedAmount > limit) {
      this.numDropped++;
      return false;
    }
    this.socket.send(pcm);
    return true;
  }

  connect() {
    this.drop();
    this.error = this.sound = null;
    this.enter({ name: "connecting", attempt: this.attempt });
    const url = new URL(this.url);
    for (const [name, value] of Object.entries(this.query)) url.searchParams.set(name, value);
    const socket = (this.socket = new WebSocket(url));
    socket.binaryType = "arraybuffer";
    // Always: a server without keys passes over it, one with keys answers at once instead of waiting for ours.
    socket.onopen = () => socket.send(JSON.stringify({ type: "auth", key: this.getKey() ?? "" }));
    socket.onmessage = ({ data }) => this.receive(data);
    socket.onclose = (closed) => this.closed(closed);
    this.after(OPEN_LIMIT_MS, () => !this.isLive && this.giveUp());
  }

  receive(data) {
    this.heardAt = performance.now();
    this.error = null; // what ends a session is the last that is said in it
    if (typeof data !== "string") {
      const sound = this.sound;
      this.sound = null;
      if (sound) this.on.onSound(sound, data);
      return;
    }
    const event = JSON.parse(data);
    if (event.type === "response.audio") this.sound = event;
    if (event.type === "error") this.error = event;
    if (event.type === "pong") this.roundTripMs = performance.now() - this.pingedAt;
    if (event.type === "session.created") this.begin(event);
    this.on.onEvent(event);
  }

  begin(session) {
    this.enter({ name: "live", session });
    this.after(STEADY_MS, () => { this.attempt = 0; });
    let numUnanswered = 0;
    this.pingedAt = 0;
    const ping = () => {
      numUnanswered = this.heardAt >= this.pingedAt ? 0 : numUnanswered + 1;
      if (numUnanswered === MAX_UNANSWERED) return this.giveUp();
      this.pingedAt = performance.now();
      this.send({ type: "ping" });
      this.after(PING_EVERY_MS, ping);
    };
    ping();
  }

  giveUp() {
    this.drop();
    this.closed({ code: 1006, reason: "" });
  }

  closed(closed) {
    this.drop();
    const isOnline = navigator.onLine !== false;
    const ending = endingOf({ closed, error: this.error, attempt: this.attempt++, isOnline });
    if (ending.retryMs === null) {
      this.enter({ name: "ended", ending });
      return;
    }
    this.enter({ name: "waiting", ending, retryAt: performance.now() + ending.retryMs });
    this.after(ending.retryMs, () => this.connect());
  }

  /** Forget the socket and all that waits for it. */
  drop() {
    for (const timer of this.timers) clearTimeout(timer);
    this.timers = [];
    const socket = this.socket;
    this.socket = null;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close(1000);
    }
  }

  after(ms, action) {
    this.timers.push(setTimeout(action, ms));
    if (this.timers.length > 32) this.timers = this.timers.slice(-16); // pings of a long session
  }

  enter(state) {
    this.state = state;
    this.on.onState(state);
  }
}
