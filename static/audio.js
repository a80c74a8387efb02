// The page's one AudioContext. It must be made inside the click: browsers keep others silent.

export class AudioUnavailable extends Error {}

/** What stands in the way of audio on this page, before anything is asked for; null when nothing does. */
export function whyNoAudio(scope = window) {
  if (!scope.isSecureContext) return "insecure";
  if (!scope.navigator.mediaDevices?.getUserMedia || !scope.AudioWorkletNode) return "unsupported";
  return null;
}

/** Call inside the click, without an await before it. The rate is the device's own: Firefox refuses others. */
export function openContext() {
  const context = new AudioContext({ latencyHint: "interactive" });
  context.resume();
  const unlock = context.createBufferSource(); // Safari: only a sound that starts in the click unlocks
  unlock.buffer = context.createBuffer(1, 1, context.sampleRate);
  unlock.connect(context.destination);
  unlock.start();
  return context;
}

export async function loadWorklets(context) {
  const load = (name) => context.audioWorklet.addModule(new URL(`worklets/${name}.js`, import.meta.url));
  await Promise.all([load("capture"), load("player")]);
}
