// Who has the floor: listening, you, thinking, answering. No I/O.

export const FLOOR = {
  idle: "Ready",
  listening: "Listening",
  you: "You are speaking",
  thinking: "Thinking",
  answering: "Answering",
};

export class Floor {
  constructor() {
    this.reset("idle");
    this.isVoiced = false;
  }

  reset(who) {
    this.who = who;
    this.writing = null; // response that is being written
    this.isSounding = false;
    this.isVoiceDue = false; // words were written whose sound has not all come
    this.silent = null; // response that gets no more sound: where the voice fails, its text goes on
  }

  /** A server's event, or the page's own {type: "commit"} and {type: "sound", isPlaying}. */
  apply(event) {
    switch (event.type) {
      case "session.created":
      case "session.updated":
        this.isVoiced = Boolean(event.voice);
        break;
      case "speech.started":
        this.who = "you";
        break;
      case "speech.stopped":
      case "commit":
        this.who = "thinking";
        break;
      case "input.transcript":
        if (event.text.trim() === "") this.settle();
        break;
      case "error":
        this.settle();
        break;
      case "response.created":
        this.writing = event.response_id;
        if (this.who !== "you") this.who = "thinking";
        break;
      case "response.text.delta":
        this.isVoiceDue = this.isVoiced && event.response_id !== this.silent;
        if (this.who !== "you") this.who = "answering";
        break;
      case "response.audio":
        if (this.who !== "you") this.who = "answering";
        break;
      case "response.done":
        this.writing = null;
        if (this.who === "answering" || this.who === "thinking") this.settle();
        break;
      case "response.audio.done":
      case "response.flush":
        this.isVoiceDue = false;
        this.silent = event.response_id;
        if (this.who === "answering") this.settle();
        break;
      case "sound":
        this.isSounding = event.isPlaying;
        if (this.who !== "you" && this.who !== "thinking") this.settle();
        break;
    }
    return this.who;
  }

  settle() {
    this.who = this.writing !== null || this.isSounding || this.isVoiceDue ? "answering" : "listening";
  }
}
