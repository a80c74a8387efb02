// The microphone's samples as 20 ms frames of PCM s16le, on the audio thread.

class Capture extends AudioWorkletProcessor {
  /** `factor`: samples averaged into one, where the context runs faster than the server takes. */
  constructor({ processorOptions: { factor, frameSamples } }) {
    super();
    this.factor = factor;
    this.frame = new Int16Array(frameSamples);
    this.numFilled = 0;
    this.sum = 0;
    this.numSummed = 0;
    this.energy = 0;
    this.isOpen = true;
    this.port.onmessage = () => { this.isOpen = false; };
  }

  process([[channel]]) {
    for (let i = 0; channel && i < channel.length; i++) {
      this.sum += channel[i];
      if (++this.numSummed === this.factor) {
        this.push(this.sum / this.factor);
        this.sum = this.numSummed = 0;
      }
    }
    return this.isOpen;
  }

  push(sample) {
    this.frame[this.numFilled++] = Math.max(-1, Math.min(1, sample)) * 32767;
    this.energy += sample * sample;
    if (this.numFilled === this.frame.length) {
      const level = Math.sqrt(this.energy / this.frame.length);
      const pcm = this.frame.buffer;
      this.frame = new Int16Array(this.numFilled);
      this.numFilled = this.energy = 0;
      this.port.postMessage({ pcm, level }, [pcm]);
    }
  }
}

registerProcessor("capture", Capture);
