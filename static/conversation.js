// One conversation: microphone, socket and loudspeaker together. Knows nothing of the page.

import { loadWorklets, openContext } from "./audio.js";
import { Connection } from "./connection.js";
import { Floor } from "./floor.js";
import { Microphone, askForMicrophone, release } from "./microphone.js";
import { Playback } from "./playback.js";
import { updatesFor } from "./settings.js";

const LATE_MS = 120; // manual: frames that are still on their way from the audio thread when the button goes up

/**
 * Calls, all optional: `onState(state)` of the connection, or {name: "asking"} for the microphone; `onEvent(event)`;
 * `onFloor(who)`; `onLevel(whose, rms)`; `onPlayed(id, ms, isFinal)`; `onProblem(error)` of the microphone,
 * null where it went away; `onAsleep()`: the browser paused all sound, see `wake`.
 */
export class Conversation {
  constructor({ url, getKey, getSettings, ...calls }) {
    this.calls = calls;
    this.getSettings = getSettings;
    this.floor = new Floor();
    this.connection = new Connection({
      url,
      getKey,
      onState: (state) => this.onState(state),
      onEvent: (event) => this.onEvent(event),
      onSound: (event, pcm) => this.onSound(event, pcm),
    });
    this.turn = null; // of the session
    this.isTalking = false; // manual: the button is down, or went up just now
    this.committing = null; // timer of a released button
  }

  get isRunning() {
    return Boolean(this.context);
  }

  get numDropped() {
    return this.connection.numDropped;
  }

  /** Call it inside a click. */
  async start() {
    if (this.isRunning) return;
    const context = (this.context = openContext());
    context.onstatechange = () => context === this.context && context.state !== "running" && this.call("onAsleep");
    this.call("onState", { name: "asking" });
    const asked = askForMicrophone();
    try {
      const [stream] = await Promise.all([asked, loadWorklets(context)]);
      if (context !== this.context) return release(stream); // stopped meanwhile
      this.microphone = new Microphone(context, stream, {
        onFrame: (pcm, level) => this.onFrame(pcm, level),
        onLost: () => this.fail(null),
      });
    } catch (error) {
      asked.then(release, () => {}); // it may be granted yet
      if (context === this.context) this.fail(error);
      return;
    }
    this.connection.start({
      sample_rate: this.microphone.rate,
      voice: this.getSettings().voice ? "on" : "off",
    });
  }

  stop() {
    this.close();
    this.connection.stop();
  }

  retryNow() {
    this.connection.retryNow();
  }

  /** The browser stops audio on its own accord (a phone call, a locked screen): call it on the next gesture. */
  wake() {
    if (this.context && this.context.state !== "running") this.context.resume();
  }

  /** What the settings say now, to the running session. */
  update() {
    if (!this.session) return;
    for (const update of updatesFor(this.session, this.getSettings())) this.connection.send(update);
  }

  press() {
    if (this.committing !== null) this.commit(); // pressed again at once: two turns
    this.isTalking = true;
    this.hush();
  }

  release() {
    this.committing = setTimeout(() => this.commit(), LATE_MS);
  }

  /** Stop the answer, at once here, and soon there. */
  hush() {
    if (this.floor.who !== "answering" && this.floor.who !== "thinking") return;
    this.connection.send({ type: "response.cancel" });
    for (const id of this.playback?.playing ?? []) this.onEvent({ type: "response.flush", response_id: id });
  }

  // inside

  commit() {
    this.stopTalking();
    this.connection.send({ type: "input.commit" });
    this.apply({ type: "commit" });
  }

  stopTalking() {
    clearTimeout(this.committing);
    this.committing = null;
    this.isTalking = false;
  }

  onFrame(pcm, level) {
    const isMuted = this.turn === "manual" && !this.isTalking;
    this.call("onLevel", "you", isMuted ? 0 : level);
    if (!isMuted) this.connection.sendAudio(pcm);
  }

  onState(state) {
    if (state.name === "live") {
      this.session = state.session;
      this.turn = state.session.turn;
      this.floor.reset("listening");
    } else {
      this.session = null;
      this.stopTalking();
      this.playback?.close();
      this.playback = null;
      this.floor.reset("idle");
    }
    this.call("onFloor", this.floor.who);
    this.call("onState", state);
    if (state.name === "live") this.update();
    if (state.name === "ended") this.close();
  }

  onEvent(event) {
    if (event.type === "session.updated") {
      this.session = { ...this.session, ...event };
      this.turn = event.turn;
    }
    if (event.type === "response.audio.done") this.playback?.end(event.response_id);
    if (event.type === "response.flush") this.flush(event.response_id);
    this.apply(event);
    this.call("onEvent", event);
  }

  onSound({ response_id: id }, pcm) {
    this.playback ??= new Playback(this.context, this.session.voice_sample_rate, {
      onPlayed: (...args) => this.call("onPlayed", ...args),
      onReport: (response_id, played_ms) => this.connection.send({ type: "response.played", response_id, played_ms }),
      onLevel: (level) => this.call("onLevel", "server", level),
    });
    this.playback.push(id, pcm);
    this.tellFloor();
  }

  flush(id) {
    if (this.playback) this.playback.flush(id);
    else this.connection.send({ type: "response.played", response_id: id, played_ms: 0 });
  }

  apply(event) {
    this.call("onFloor", this.floor.apply(event));
  }

  tellFloor() {
    this.apply({ type: "sound", isPlaying: this.playback?.isPlaying ?? false });
  }

  fail(error) {
    this.stop();
    this.call("onProblem", error);
  }

  /** Let go of microphone and loudspeaker. */
  close() {
    this.microphone?.close();
    this.playback?.close();
    this.context?.close();
    this.microphone = this.playback = this.context = null;
  }

  call(name, ...args) {
    if (name === "onPlayed" && args[2]) this.tellFloor();
    this.calls[name]?.(...args);
  }
}
