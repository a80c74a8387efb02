// Records what the page's player gives to the loudspeaker, sample by sample.
globalThis.testTap = {
  chunks: [],
  rate: 0,
  contextStates: [],

  taken() {
    const all = new Float32Array(this.chunks.reduce((sum, chunk) => sum + chunk.length, 0));
    let place = 0;
    for (const chunk of this.chunks) {
      all.set(chunk, place);
      place += chunk.length;
    }
    const bytes = new Uint8Array(all.buffer);
    let text = "";
    for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
    return [btoa(text), this.rate];
  },
};
{
  const { addModule } = AudioWorklet.prototype;
  AudioWorklet.prototype.addModule = function (url) {
    return Promise.all([addModule.call(this, url), addModule.call(this, "/tap.js")]).then(() => undefined);
  };
  const { connect } = AudioNode.prototype;
  AudioNode.prototype.connect = function (target, ...rest) {
    const result = connect.call(this, target, ...rest);
    const { context } = this;
    if (target === context.destination && this instanceof AudioWorkletNode && this.numberOfInputs === 0) {
      testTap.rate = context.sampleRate;
      testTap.contextStates.push(context.state);
      const tap = new AudioWorkletNode(context, "tap");
      tap.port.onmessage = ({ data }) => testTap.chunks.push(data);
      connect.call(this, tap);
      connect.call(tap, context.destination);
    }
    return result;
  };
}
