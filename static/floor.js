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
  }

  reset(who) {
    this.who = who;
    this.writing = null; // response that is being written
    this.isSounding = false;
  }

  /** A server's event, or the page's own {type: "commit"} and {type: "sound", isPlaying}. */
  apply(event) {
    switch (event.type) {
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
      case "response.audio":
        if (this.who !== "you") this.who = "answering";
        break;
      case "response.done":
        this.writing = null;
        if (this.who === "answering" || this.who === "thinking") this.settle();
        break;
      case "sound":
        this.isSounding = event.isPlaying;
        if (this.who !== "you" && this.who !== "thinking") this.settle();
        break;
    }
    return this.who;
  }

  settle() {
    this.who = this.writing !== null || this.isSounding ? "answering" : "listening";
  }
}
