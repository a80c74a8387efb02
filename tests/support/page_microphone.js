// A microphone that says what a test tells it to. Keeps the constraints that the page asked for.
globalThis.testMicrophone = {
  async open(constraints) {
    this.constraints = constraints;
    this.context = new AudioContext();
    this.destination = this.context.createMediaStreamDestination();
    return this.destination.stream;
  },

  /** `data`: base64 of s16le. Resolves when it has been said. */
  say(data, rate) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const samples = Float32Array.from(new Int16Array(bytes.buffer), (value) => value / 32768);
    const source = this.context.createBufferSource();
    source.buffer = this.context.createBuffer(1, samples.length, rate);
    source.buffer.copyToChannel(samples, 0);
    source.connect(this.destination);
    return new Promise((resolve) => {
      source.onended = () => resolve();
      source.start();
    });
  },
};
if (navigator.mediaDevices) {
  navigator.mediaDevices.getUserMedia = (constraints) => globalThis.testMicrophone.open(constraints);
}
