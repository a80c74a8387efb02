// The transcript on the page: one list item per entry, in the order they came, read out when complete.

const NEAR_END_PX = 60;
const NAMES = { you: "You", server: "Metronome" };
const CUT = { interrupted: "interrupted here", cancelled: "stopped here", failed: "broken off here" };

export class TranscriptView {
  /** `parts`: elements `list`, `scroller`, `empty`, `latest` (a button), `announcer` (a polite live region). */
  constructor(parts) {
    this.parts = parts;
    this.items = new Map(); // entry id -> li
    this.isFollowing = true;
    parts.scroller.addEventListener("scroll", () => this.onScroll());
    parts.latest.addEventListener("click", () => {
      this.isFollowing = true;
      this.follow();
      parts.list.lastElementChild?.focus({ preventScroll: true });
    });
  }

  show(entry) {
    let item = this.items.get(entry.id);
    if (!item) {
      item = makeItem(entry);
      this.items.set(entry.id, item);
      this.parts.list.append(item);
      this.parts.empty.hidden = true;
    }
    fill(item, entry);
    if (entry.state !== "live" && !item.dataset.read && entry.text) {
      item.dataset.read = "yes";
      this.parts.announcer.textContent = `${NAMES[entry.who]}: ${entry.text}`;
    }
    this.follow();
  }

  remove(entry) {
    this.items.get(entry.id)?.remove();
    this.items.delete(entry.id);
    this.parts.empty.hidden = this.items.size > 0;
  }

  follow() {
    const { scroller, latest } = this.parts;
    if (this.isFollowing) scroller.scrollTop = scroller.scrollHeight;
    latest.hidden = this.isFollowing;
  }

  onScroll() {
    const { scroller } = this.parts;
    this.isFollowing = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
    this.parts.latest.hidden = this.isFollowing;
  }
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function makeItem(entry) {
  const item = element("li", `entry ${entry.who}`);
  item.tabIndex = -1;
  const words = element("p", "words");
  words.append(element("span", "heard"), element("span", "mark"), element("span", "unheard"));
  item.append(element("span", "name", NAMES[entry.who]), words);
  return item;
}

function fill(item, entry) {
  const [heard, mark, unheard] = item.querySelector(".words").children;
  const { text, heardChars } = entry;
  const gap = heardChars === null ? 0 : text.slice(heardChars).search(/\S|$/); // the space before what was not heard
  const split = heardChars === null ? text.length : heardChars + gap;
  setText(heard, text.slice(0, split));
  setText(unheard, text.slice(split).trimEnd());
  setText(mark, entry.state === "cut" ? ` ${CUT[entry.reason] ?? "interrupted here"} ` : "");
  item.dataset.state = entry.state;
  item.classList.toggle("waiting", entry.state === "live" && !entry.text);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
