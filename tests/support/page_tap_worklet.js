class Tap extends AudioWorkletProcessor {
  process([[channel]]) {
    if (channel) this.port.postMessage(channel.slice());
    return true;
  }
}
if (!globalThis.hasTap) registerProcessor("tap", Tap);
globalThis.hasTap = true;
