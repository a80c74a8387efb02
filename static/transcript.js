// The conversation's text, as data. Bounded: a session may last all day. No I/O, no DOM.

export const MAX_ENTRIES = 200;
const MAX_CHARS = 20_000; // of one entry

/**
 * An entry: {id, who: "you" | "server", text, state, heardChars, clauses}.
 * `state`: `live` (goes on), `done`, `cut` (interrupted: the text behind `heardChars` was not heard).
 * `heardChars`: null where nothing is spoken, so that all of it counts as read. `clauses`: what was spoken of it,
 * each {start, end, durationMs}.
 */
export class Transcript {
  /** `onChange(entry)`: it is new, or changed; `onRemove(entry)`. */
  constructor({ onChange, onRemove }) {
    this.on = { onChange, onRemove };
    this.entries = [];
    this.numEntries = 0;
    this.isVoiced = false; // answers are spoken: what is written is not heard yet
    this.mine = null; // what is being said and has no text yet
  }

  apply(event) {
    const entry = this.find(event.response_id);
    switch (event.type) {
      case "session.created":
      case "session.updated":
        this.isVoiced = Boolean(event.voice);
        break;
      case "speech.started":
        this.listen(event.audio_ms);
        break;
      case "speech.stopped":
        if (this.mine) this.change(this.mine, { spokenMs: event.audio_ms - this.mine.startMs });
        break;
      case "input.transcript":
        this.heard(event.text.trim());
        break;
      case "response.created":
        this.settleMine();
        this.add({ who: "server", response: event.response_id, heardChars: this.isVoiced ? 0 : null });
        break;
      case "response.text.delta":
        if (entry) this.change(entry, { text: (entry.text + event.delta).slice(0, MAX_CHARS) });
        break;
      case "response.audio":
        if (entry) this.speak(entry, event);
        break;
      case "response.audio.done":
        if (entry && entry.clauses.length === 0) this.change(entry, { heardChars: null });
        break;
      case "warning":
        if (event.code === "voice_failed") this.silence();
        break;
      case "response.done":
        if (entry) this.finish(entry, event.reason);
        break;
      case "response.flush":
        if (entry) this.change(entry, { state: "cut" });
        break;
      case "response.heard": // the server's word on what the conversation keeps
        if (entry) this.change(entry, { heardChars: endOfWords(entry.text, countWords(event.text)) });
        break;
    }
  }

  /** So much of a spoken response was heard; `isFinal`: no more will be. */
  played(response, playedMs, isFinal) {
    const entry = this.find(response);
    if (!entry || entry.heardChars === null) return; // read, not heard
    const isWhole = isFinal && entry.state !== "cut";
    this.change(entry, { heardChars: isWhole ? entry.text.length : heardChars(entry, playedMs) });
  }

  /** The session is over: nothing goes on, and what was not heard never will be. */
  close() {
    if (this.mine) this.remove(this.mine);
    for (const entry of this.entries) {
      const isOpen = entry.state === "live" || (entry.heardChars ?? Infinity) < entry.text.trimEnd().length;
      if (entry.who === "server" && isOpen && entry.state !== "cut") {
        this.change(entry, { state: "cut", reason: "cancelled" });
      }
    }
  }

  clear() {
    while (this.entries.length) this.remove(this.entries[0]);
  }

  // inside

  listen(startMs) {
    if (this.mine) return;
    this.mine = this.add({ who: "you", startMs });
  }

  heard(text) {
    const mine = this.mine;
    if (!text) {
      if (mine) this.remove(mine);
      return;
    }
    const last = this.entries.at(-1);
    if (mine) this.change(mine, { text, state: "done" });
    else if (last?.who === "you") this.change(last, { text: `${last.text} ${text}`.slice(-MAX_CHARS) });
    else this.add({ who: "you", text, state: "done" });
    this.mine = null;
  }

  /** The answer comes, and no words of the question: this model does not write them down. */
  settleMine() {
    if (!this.mine) return;
    const seconds = Math.max(1, Math.round((this.mine.spokenMs ?? 0) / 1000));
    this.change(this.mine, { text: `(spoken, ${seconds} s)`, state: "done" });
    this.mine = null;
  }

  speak(entry, { text, duration_ms: durationMs }) {
    const found = entry.text.indexOf(text.trim(), entry.clauses.at(-1)?.end ?? 0);
    const start = found >= 0 ? found : (entry.clauses.at(-1)?.end ?? 0);
    const end = Math.min(entry.text.length, start + text.trim().length);
    entry.clauses.push({ start, end, durationMs });
  }

  /** The voice failed: what is left of the answer is read. */
  silence() {
    for (const entry of this.entries) {
      if (entry.who === "server" && entry.state === "live") this.change(entry, { heardChars: null });
    }
  }

  finish(entry, reason) {
    const isCut = reason === "interrupted" || reason === "cancelled" || reason === "failed";
    this.change(entry, { state: isCut || entry.state === "cut" ? "cut" : "done", reason });
  }

  find(response) {
    return response ? this.entries.findLast((entry) => entry.response === response) : undefined;
  }

  add(fields) {
    const entry = { id: ++this.numEntries, text: "", state: "live", heardChars: null, clauses: [], ...fields };
    this.entries.push(entry);
    while (this.entries.length > MAX_ENTRIES) this.remove(this.entries[0]);
    this.on.onChange(entry);
    return entry;
  }

  change(entry, fields) {
    Object.assign(entry, fields);
    this.on.onChange(entry);
  }

  remove(entry) {
    this.entries = this.entries.filter((other) => other !== entry);
    if (this.mine === entry) this.mine = null;
    this.on.onRemove(entry);
  }
}

/** Characters of the entry's text that so much playing has spoken, up to the end of a word. */
export function heardChars({ text, clauses }, playedMs) {
  let left = playedMs;
  for (const { start, end, durationMs } of clauses) {
    if (left < durationMs) {
      const place = start + Math.round(((end - start) * Math.max(0, left)) / durationMs);
      const space = text.slice(0, place).lastIndexOf(" ");
      return place >= end || /\s/.test(text[place] ?? " ") ? place : Math.max(start, space + 1);
    }
    left -= durationMs;
  }
  return clauses.length ? clauses.at(-1).end : 0;
}

function countWords(text) {
  return text.split(/\s+/).filter(Boolean).length;
}

/** Where the first `num` words of the text end. */
export function endOfWords(text, num) {
  const words = [...text.matchAll(/\S+/g)];
  const last = words[Math.min(num, words.length) - 1];
  return last ? last.index + last[0].length : 0;
}
