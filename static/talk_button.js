// Push to talk: held by mouse, finger, Space or Enter; toggled by a click that no one held (screen readers).

const KEYS = [" ", "Enter"];

export class TalkButton {
  /** `onPress()`, `onRelease()`. */
  constructor(button, { onPress, onRelease }) {
    this.button = button;
    this.on = { onPress, onRelease };
    this.isHeld = false;
    this.wasHeld = false; // a held press ends in a click that means nothing
    button.addEventListener("pointerdown", (event) => {
      button.setPointerCapture(event.pointerId);
      this.hold(true);
    });
    for (const name of ["pointerup", "pointercancel"]) button.addEventListener(name, () => this.hold(false));
    button.addEventListener("keydown", (event) => {
      if (!KEYS.includes(event.key)) return;
      event.preventDefault();
      if (!event.repeat) this.hold(true);
    });
    button.addEventListener("keyup", (event) => KEYS.includes(event.key) && this.hold(false));
    button.addEventListener("blur", () => this.hold(false));
    button.addEventListener("contextmenu", (event) => event.preventDefault()); // a long touch
    button.addEventListener("click", () => {
      if (!this.wasHeld) this.set(!this.isHeld);
      this.wasHeld = false;
    });
  }

  /** The session that was talked to is gone: the button is up, and nothing is sent. */
  reset() {
    this.show(false);
  }

  hold(isDown) {
    if (isDown) this.wasHeld = true;
    this.set(isDown);
  }

  set(isHeld) {
    if (isHeld === this.isHeld) return;
    this.show(isHeld);
    if (isHeld) this.on.onPress();
    else this.on.onRelease();
  }

  show(isHeld) {
    this.isHeld = isHeld;
    this.button.setAttribute("aria-pressed", isHeld);
    this.button.textContent = isHeld ? "Release to send" : "Hold to talk";
  }
}
