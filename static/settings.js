// What the person chose: kept in this browser. The key only as long as the tab lives.

const NAME = "metronome.settings";
const KEY_NAME = "metronome.key";
const DEFAULTS = { instructions: "", voice: true, turn: "server_vad" };
const TURNS = ["server_vad", "manual", "continuous"];

/** `storage` may be missing or forbidden: then nothing is kept. */
export function loadSettings(storage = stored("localStorage")) {
  try {
    const found = { ...DEFAULTS, ...JSON.parse(storage?.getItem(NAME) ?? "{}") };
    return {
      instructions: String(found.instructions).slice(0, 4000),
      voice: found.voice !== false,
      turn: TURNS.includes(found.turn) ? found.turn : DEFAULTS.turn,
    };
  } catch {
    return { ...DEFAULTS };
  }
}

export function saveSettings(settings, storage = stored("localStorage")) {
  try {
    storage?.setItem(NAME, JSON.stringify(settings));
  } catch {
    // full or forbidden: they hold for this visit
  }
}

let keyOfPage = null; // where nothing can be stored

export function getKey() {
  return keyOfPage ?? stored("sessionStorage")?.getItem(KEY_NAME) ?? null;
}

export function setKey(key) {
  keyOfPage = key;
  try {
    stored("sessionStorage")?.setItem(KEY_NAME, key);
  } catch {
    // the variable holds it
  }
}

/**
 * What must be said to a session that is as `session` so that it is as the person wants it.
 * One message for each field: the server takes all of a message or nothing, and may not know such a turn.
 */
export function updatesFor(session, { instructions, voice, turn }) {
  const updates = [];
  if (instructions.trim() && instructions !== session.instructions) updates.push({ instructions });
  if (turn !== session.turn) updates.push({ turn });
  const hasVoice = Boolean(session.voice_sample_rate);
  if (hasVoice && voice !== session.voice) updates.push({ voice });
  return updates.map((update) => ({ type: "session.update", ...update }));
}

/** The dialog's form. `onSave(settings)`. */
export class SettingsDialog {
  constructor(dialog, onSave) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    this.form.addEventListener("submit", (event) => {
      if (event.submitter?.value !== "save") return;
      const { instructions, voice, turn } = this.form.elements;
      onSave({ instructions: instructions.value.trim(), voice: voice.checked, turn: turn.value });
    });
  }

  open({ instructions, voice, turn }) {
    const fields = this.form.elements;
    fields.instructions.value = instructions;
    fields.voice.checked = voice;
    fields.turn.value = turn;
    this.dialog.showModal();
  }
}

function stored(name) {
  try {
    return window[name];
  } catch {
    return null; // forbidden by the browser's settings
  }
}
