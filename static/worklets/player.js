// Plays the answer's samples without gaps, on the audio thread: a queue, resampled as it is read.
// Counts what was played of each response to the sample, and forgets the rest of one when told to.

const TAPS = 16;
const PHASES = 256;
const FADE_SAMPLES = 64; // of a flush: 3 ms, so that it does not click
const REPORT_S = 0.04;
const MAX_WAITING_S = 600; // longer than any answer may be

/** Windowed sinc (Hann), one row of TAPS for each fraction of a sample; each row sums to 1. */
function filterRows(cutoff) {
  return Array.from({ length: PHASES }, (_, phase) => {
    const row = new Float32Array(TAPS);
    for (let tap = 0; tap < TAPS; tap++) {
      const x = tap - TAPS / 2 + 1 - phase / PHASES;
      const sinc = x === 0 ? cutoff : Math.sin(Math.PI * cutoff * x) / (Math.PI * x);
      row[tap] = sinc * (0.5 + 0.5 * Math.cos((2 * Math.PI * x) / TAPS));
    }
    const sum = row.reduce((a, b) => a + b);
    return row.map((value) => value / sum);
  });
}

class Player extends AudioWorkletProcessor {
  constructor({ processorOptions: { sourceRate } }) {
    super();
    this.step = sourceRate / sampleRate;
    this.rows = filterRows(0.95 * Math.min(1, 1 / this.step));
    this.line = new Float32Array(2 * TAPS); // the last TAPS source samples, twice, so that they lie in a row
    this.place = 0;
    this.phase = 0;
    this.numSilent = TAPS; // source samples since the last real one
    this.queue = []; // {id, samples, at}
    this.maxWaiting = MAX_WAITING_S * sourceRate;
    this.numWaiting = 0;
    this.played = new Map(); // response -> samples; those that have neither ended nor been flushed
    this.ended = new Set(); // responses of which nothing more will come
    this.energy = 0;
    this.numSinceReport = 0;
    this.isOpen = true;
    this.port.onmessage = ({ data }) => this[data.type](data);
  }

  push({ id, samples }) {
    if (!this.played.has(id)) this.played.set(id, 0);
    if (this.numWaiting + samples.length > this.maxWaiting) return;
    this.numWaiting += samples.length;
    this.queue.push({ id, samples, at: 0 });
  }

  end({ id }) {
    this.ended.add(id);
    this.report(id);
  }

  flush({ id }) {
    const playing = this.queue[0]?.id === id ? this.queue[0] : null;
    this.queue = this.queue.filter((chunk) => chunk.id !== id);
    if (playing) {
      const rest = playing.samples.slice(playing.at, playing.at + FADE_SAMPLES);
      this.queue.unshift({ id: null, samples: rest.map((s, i) => s * (1 - i / rest.length)), at: 0 });
    }
    this.numWaiting = this.queue.reduce((sum, chunk) => sum + chunk.samples.length - chunk.at, 0);
    this.port.postMessage({ type: "flushed", id, numPlayed: this.played.get(id) ?? 0 });
    this.played.delete(id);
    this.ended.delete(id);
  }

  close() {
    this.isOpen = false;
  }

  process(inputs, [[out]]) {
    const isSilent = this.queue.length === 0 && this.numSilent >= TAPS;
    for (let i = 0; i < out.length && !isSilent; i++) {
      out[i] = this.nextOutput();
      this.energy += out[i] * out[i];
    }
    this.numSinceReport += out.length;
    if (this.numSinceReport >= REPORT_S * sampleRate && this.played.size > 0) this.reportAll();
    return this.isOpen;
  }

  nextOutput() {
    const row = this.rows[Math.floor(this.phase * PHASES)];
    let sum = 0;
    for (let tap = 0; tap < TAPS; tap++) sum += row[tap] * this.line[this.place + tap];
    for (this.phase += this.step; this.phase >= 1; this.phase--) this.shiftIn(this.nextSource());
    return sum;
  }

  shiftIn(sample) {
    this.line[this.place] = this.line[this.place + TAPS] = sample;
    this.place = (this.place + 1) % TAPS;
  }

  nextSource() {
    const head = this.queue[0];
    if (!head) {
      this.numSilent++;
      return 0;
    }
    this.numSilent = 0;
    this.numWaiting--;
    const sample = head.samples[head.at++] / 32768;
    if (head.id !== null) this.played.set(head.id, this.played.get(head.id) + 1);
    if (head.at >= head.samples.length) this.queue.shift();
    return sample;
  }

  reportAll() {
    const level = Math.sqrt(this.energy / this.numSinceReport);
    this.numSinceReport = this.energy = 0;
    this.port.postMessage({ type: "level", level });
    for (const id of [...this.played.keys()]) this.report(id);
  }

  report(id) {
    const hasEnded = this.ended.has(id) && !this.queue.some((chunk) => chunk.id === id);
    this.port.postMessage({ type: "played", id, numPlayed: this.played.get(id) ?? 0, hasEnded });
    if (hasEnded) {
      this.played.delete(id);
      this.ended.delete(id);
    }
  }
}

registerProcessor("player", Player);
