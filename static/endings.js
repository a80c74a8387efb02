// What the end of a socket means: from close code and last error to words, and whether to come back. No I/O.

const FIRST_BACKOFF_MS = 500;
const MAX_BACKOFF_MS = 15_000;
export const MAX_ATTEMPTS = 10; // then a person decides

/** Doubling, jittered by half, so that a server's clients do not come back together. */
export function backoffMs(attempt, random = Math.random) {
  return Math.min(MAX_BACKOFF_MS, FIRST_BACKOFF_MS * 2 ** attempt) * (0.5 + random());
}

const WORDS = {
  at_capacity: [
    "All places are taken",
    "This server takes only as many conversations as it can answer in time. It will be asked again when it expects a place to be free.",
  ],
  key_limit: ["This key is in use", "All conversations that this key may have are running."],
  too_many_pending: ["The server is busy", "Too many visitors are signing in at this moment."],
  starting: ["The server is starting", "It loads its model first. This takes a few seconds."],
  draining: ["The server is shutting down", "It takes no new conversations. Another one usually takes its place."],
  engine_failed: ["The model stopped", "The server is starting it anew. What was said so far is lost."],
  session_failed: ["The conversation broke off", "The server made a mistake. What was said so far is lost."],
  slow_reader: ["The connection is too slow", "The server's answers could not be delivered in time."],
};

const LOST = ["engine_failed", "session_failed", "slow_reader"];

const OVER = {
  session_over: "The conversation is over",
  origin_not_allowed: "This page may not use this server",
  too_fast: "Too many messages",
  too_big: "A message was too large",
  not_understood: "The server refused the settings",
};

/**
 * `closed`: {code, reason}; `error`: the last error event before it, or null; `attempt`: failed ones in a row.
 * Gives {kind, title, text, retryMs}: kind is `key` (ask for one), `refused` or `lost` (come back after
 * `retryMs`, null: only when a person says so), `over` (nothing to repeat).
 */
export function endingOf({ closed, error, attempt, isOnline = true, random = Math.random }) {
  const wait = (ms) => (attempt >= MAX_ATTEMPTS ? null : ms);
  const code = error?.code;
  if (code === "unauthorized") return { kind: "key", title: "A key is needed", text: error.message, retryMs: null };
  if (code in WORDS) {
    const [title, text] = WORDS[code];
    const kind = LOST.includes(code) ? "lost" : "refused";
    return { kind, title, text, retryMs: wait(error.retry_after_ms ?? backoffMs(attempt, random)) };
  }
  if (error && (code in OVER || closed.code !== 1006)) {
    return { kind: "over", title: OVER[code] ?? "The conversation ended", text: error.message, retryMs: null };
  }
  if (closed.code === 1000) {
    return { kind: "over", title: "The conversation is over", text: closed.reason, retryMs: null };
  }
  return {
    kind: "lost",
    title: isOnline ? "The connection was lost" : "You are offline",
    text: isOnline ? "The server does not answer." : "It is taken up again when the network is back.",
    retryMs: wait(backoffMs(attempt, random)),
  };
}
