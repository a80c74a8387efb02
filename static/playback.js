// The spoken answer: what came, what was heard of it, and its sudden end.

const REPORT_MS = 250;
const REMEMBERED = 16; // flushed responses whose late audio is dropped

export class Playback {
  /**
   * `onPlayed(id, playedMs, isFinal)`: what left the loudspeaker so far, often, for the eyes.
   * `onReport(id, playedMs)`: the same for the server: each 250 ms, at the end, right after a flush.
   * `onLevel(level)`: RMS from 0 to 1.
   */
  constructor(context, sourceRate, { onPlayed, onReport, onLevel }) {
    this.context = context;
    this.rate = sourceRate;
    this.on = { onPlayed, onReport, onLevel };
    this.open = new Map(); // response -> {reportedAt, playedMs}
    this.flushed = [];
    this.node = new AudioWorkletNode(context, "player", {
      numberOfInputs: 0,
      outputChannelCount: [1],
      processorOptions: { sourceRate },
    });
    this.node.port.onmessage = ({ data }) => this.hear(data);
    this.node.connect(context.destination);
  }

  get isPlaying() {
    return this.open.size > 0;
  }

  /** Ids of the responses that sound, or will. */
  get playing() {
    return [...this.open.keys()];
  }

  /** `pcm`: ArrayBuffer of s16le mono at the source rate; typed arrays are little-endian on every browser. */
  push(id, pcm) {
    if (this.flushed.includes(id)) return;
    if (!this.open.has(id)) this.open.set(id, { reportedAt: performance.now(), playedMs: 0 });
    const samples = new Int16Array(pcm.slice(0, pcm.byteLength & ~1));
    if (samples.length) this.node.port.postMessage({ type: "push", id, samples }, [samples.buffer]);
  }

  /** Nothing more will come of this response. */
  end(id) {
    if (this.open.has(id)) this.node.port.postMessage({ type: "end", id });
  }

  /** Silence, now. */
  flush(id) {
    if (this.flushed.includes(id)) return;
    this.flushed = [...this.flushed, id].slice(-REMEMBERED);
    if (this.open.has(id)) this.node.port.postMessage({ type: "flush", id });
    else this.on.onReport(id, 0);
  }

  close() {
    this.node.port.onmessage = null;
    this.node.port.postMessage({ type: "close" });
    this.node.disconnect();
    this.open.clear();
  }

  /** What was handed to the device so long ago is only now heard. Safari does not say. */
  get latencyMs() {
    return 1000 * (this.context.outputLatency || this.context.baseLatency || 0);
  }

  hear({ type, id, numPlayed, hasEnded, level }) {
    if (type === "level") this.on.onLevel(level);
    const response = this.open.get(id);
    if (!response) return;
    const playedMs = (1000 * numPlayed) / this.rate;
    if (type === "played" && hasEnded) {
      setTimeout(() => this.finish(id, playedMs), this.latencyMs);
      return;
    }
    response.playedMs = Math.max(response.playedMs, playedMs - this.latencyMs);
    if (type === "flushed") this.finish(id, response.playedMs);
    else this.report(id, response);
  }

  report(id, response) {
    this.on.onPlayed(id, response.playedMs, false);
    if (performance.now() - response.reportedAt >= REPORT_MS) {
      response.reportedAt = performance.now();
      this.on.onReport(id, Math.round(response.playedMs));
    }
  }

  finish(id, playedMs) {
    if (!this.open.delete(id)) return;
    this.on.onPlayed(id, playedMs, true);
    this.on.onReport(id, Math.round(playedMs));
    if (!this.isPlaying) this.on.onLevel(0);
  }
}
