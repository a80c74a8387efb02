// Asks for the server's key. The field is emptied at once: the key is in the tab's session storage only.

import { setKey } from "./settings.js";

export class KeyDialog {
  /** `onKey()`: there is a new one. */
  constructor(dialog, onKey) {
    this.dialog = dialog;
    this.text = dialog.querySelector("p");
    this.field = dialog.querySelector("input");
    dialog.addEventListener("close", () => (this.field.value = ""));
    dialog.querySelector("form").addEventListener("submit", (event) => {
      if (event.submitter?.value !== "save") return;
      setKey(this.field.value.trim());
      onKey();
    });
  }

  /** `wasRefused`: one was given, and it was wrong. */
  open(wasRefused) {
    this.text.textContent = wasRefused
      ? "The key that was used is not known here. Try another one."
      : "Whoever runs the server can give you one.";
    this.dialog.showModal();
  }
}
