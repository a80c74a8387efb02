// The microphone at its native rate, as 20 ms frames.

const FRAME_S = 0.02;
const MAX_RATE = 48_000; // what the server takes; faster contexts are averaged down by a whole factor
const CONSTRAINTS = {
  audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
};

/** Asks for permission. Rejects with the browser's DOMException. */
export async function askForMicrophone() {
  return navigator.mediaDevices.getUserMedia(CONSTRAINTS);
}

export class Microphone {
  /**
   * `onFrame(pcm, level)`: an ArrayBuffer of s16le at `rate`, and its RMS from 0 to 1.
   * `onLost()`: the device went away.
   */
  constructor(context, stream, { onFrame, onLost }) {
    const factor = Math.ceil(context.sampleRate / MAX_RATE);
    this.rate = Math.round(context.sampleRate / factor);
    this.stream = stream;
    this.source = context.createMediaStreamSource(stream);
    this.node = new AudioWorkletNode(context, "capture", {
      channelCount: 1,
      channelCountMode: "explicit",
      processorOptions: { factor, frameSamples: Math.round(this.rate * FRAME_S) },
    });
    this.node.port.onmessage = ({ data }) => onFrame(data.pcm, data.level);
    for (const track of stream.getTracks()) track.onended = onLost;
    // To the speakers, though it is silent: Safari runs only what leads there.
    this.source.connect(this.node).connect(context.destination);
  }

  close() {
    this.node.port.onmessage = null;
    this.node.port.postMessage("close");
    this.source.disconnect();
    this.node.disconnect();
    release(this.stream);
  }
}

export function release(stream) {
  for (const track of stream.getTracks()) {
    track.onended = null;
    track.stop();
  }
}
