// The page: what a conversation says, put where one can see it; what is pressed, told to the conversation.

import { whyNoAudio } from "./audio.js";
import { Conversation } from "./conversation.js";
import { Dial } from "./dial.js";
import { FLOOR } from "./floor.js";
import { Gauge } from "./gauge.js";
import { KeyDialog } from "./key_dialog.js";
import { LatenessPlot, ms } from "./lateness.js";
import { ProblemView } from "./problem_view.js";
import { LOST_MICROPHONE, problemOfMicrophone, problemOfPage } from "./problems.js";
import { SettingsDialog, getKey, loadSettings, saveSettings } from "./settings.js";
import { TalkButton } from "./talk_button.js";
import { Transcript } from "./transcript.js";
import { TranscriptView } from "./transcript_view.js";

const $ = (id) => document.getElementById(id);
const NOTICE_MS = 12_000;
const TONES = { refused: "wait", lost: "wait", over: "calm", key: "calm" };
const WARNINGS = ["audio_dropped", "voice_failed", "session_expiring", "draining"]; // others help no one here
const HINTS = {
  idle: "Start, allow the microphone, and talk. You may interrupt at any time.",
  asking: "Your browser asks whether this page may use the microphone.",
  connecting: "One moment.",
  waiting: "Nothing is sent meanwhile.",
  server_vad: "Just talk, and pause when you have finished. You may interrupt at any time.",
  manual: "Hold the button, or the space bar on it, while you speak.",
  continuous: "Just talk. It decides by itself when to answer.",
};

let settings = loadSettings();
const socketUrl = new URL("v1/stream", document.baseURI);
socketUrl.protocol = socketUrl.protocol.replace("http", "ws");

const dial = new Dial($("dial"), $("input-level"));
const plot = new LatenessPlot($("lateness"), {
  last: $("late-last"), median: $("late-median"), worst: $("late-worst"),
});
const transcriptView = new TranscriptView({
  list: $("entries"), scroller: $("scroller"), empty: $("transcript-empty"), latest: $("latest"), announcer: $("announcer"),
});
const transcript = new Transcript({
  onChange: (entry) => { transcriptView.show(entry); $("clear").hidden = false; },
  onRemove: (entry) => { transcriptView.remove(entry); $("clear").hidden = transcript.entries.length === 0; },
});
const gauge = new Gauge({
  url: new URL("capacity", document.baseURI), getKey,
  parts: {
    status: $("server-status"), meter: $("capacity"), places: $("places"), words: $("capacity-words"),
    late: $("all-late"), kv: $("all-kv"), refused: $("all-refused"),
  },
  onCapacity: (capacity) => {
    $("model").textContent = capacity.model;
    plot.setScale({ budgetMs: capacity.budget_ms, targetMs: capacity.target_ms });
  },
});
const problem = new ProblemView(
  {
    panel: $("problem"), title: $("problem-title"), text: $("problem-text"), steps: $("problem-steps"),
    countdown: $("problem-countdown"), retry: $("problem-retry"), cancel: $("problem-cancel"),
  },
  { onRetry: () => (conversation.isRunning ? conversation.retryNow() : start()), onCancel: dismiss },
);
const conversation = new Conversation({
  url: socketUrl, getKey, getSettings: () => settings,
  onState: showState, onEvent: showEvent, onFloor: showFloor, onProblem: showMicrophoneProblem,
  onAsleep: () => showNotice("The browser has paused the sound: touch the page, or press a key."),
  onLevel: (whose, rms) => dial.setLevel(whose, rms),
  onPlayed: (...args) => transcript.played(...args),
});
const settingsDialog = new SettingsDialog($("settings"), (chosen) => {
  settings = chosen;
  saveSettings(settings);
  conversation.update();
});
const keyDialog = new KeyDialog($("key"), () => { gauge.poll(); start(); });
const talkButton = new TalkButton($("talk"), { onPress: () => conversation.press(), onRelease: () => conversation.release() });

function start() {
  problem.hide();
  conversation.start();
}

function dismiss() {
  problem.hide();
  if (conversation.isRunning) conversation.stop();
  $("start").focus();
}

function showState(state) {
  const isRunning = conversation.isRunning && state.name !== "ended";
  const isLive = state.name === "live";
  document.body.dataset.state = state.name;
  $("start").textContent = !isRunning ? "Start talking" : state.name === "waiting" ? "Stop waiting" : "End conversation";
  $("start").classList.toggle("stop", isRunning);
  $("hint").textContent = HINTS[isLive ? conversation.turn : state.name] ?? HINTS.idle;
  const words = { asking: "Microphone?", connecting: "Connecting", waiting: "Waiting" }[state.name];
  if (words) $("floor-words").textContent = words;
  $("status").textContent = isLive ? "Connected. Talk now." : (words ?? "Not connected.");
  $("hush").hidden = !isLive;
  $("talk").hidden = !isLive || conversation.turn !== "manual";
  if (isLive || state.name === "asking" || state.name === "idle") problem.hide();
  if (isLive) plot.setScale({ budgetMs: state.session.budget_ms });
  if (!isLive) {
    dial.silence();
    talkButton.reset();
    transcript.close();
    $("technical").hidden = $("notice").hidden = true;
  }
  if (state.ending) showEnding(state);
  if (isLive || state.ending) gauge.poll();
}

function showEnding({ ending, retryAt = null }) {
  if (ending.kind === "key") {
    keyDialog.open(Boolean(getKey()));
    return;
  }
  problem.show(ending, {
    tone: TONES[ending.kind],
    retryAt,
    retryLabel: retryAt === null ? "Start again" : "Try now",
    canDismiss: retryAt === null, // else the page's own button stops the waiting
  });
}

function showFloor(who) {
  $("floor").dataset.who = who;
  $("floor-words").textContent = FLOOR[who];
  $("hush").setAttribute("aria-disabled", who !== "answering" && who !== "thinking");
  dial.setFloor(who);
}

function showEvent(event) {
  transcript.apply(event);
  if (event.type === "tick") plot.push(event.lateness_ms);
  if (event.type === "error" || WARNINGS.includes(event.code)) showNotice(event.message);
  if (event.type === "session.updated") showState({ name: "live", session: conversation.session });
  if (event.type === "pong") showTechnical();
}

let noticeTimer = 0;

function showNotice(text) {
  clearTimeout(noticeTimer);
  $("notice").textContent = text;
  $("notice").hidden = false;
  noticeTimer = setTimeout(() => { $("notice").hidden = true; }, NOTICE_MS);
}

function showTechnical() {
  const { connection, numDropped } = conversation;
  const dropped = numDropped ? `, ${numDropped} frames dropped on a slow connection` : "";
  $("technical").textContent = `Round trip ${ms(connection.roundTripMs)}${dropped}.`;
  $("technical").hidden = false;
}

function showMicrophoneProblem(error) {
  problem.show(error ? problemOfMicrophone(error) : LOST_MICROPHONE, { retryLabel: "Start again" });
}

$("start").addEventListener("click", () => (conversation.isRunning ? conversation.stop() : start()));
$("hush").addEventListener("click", () => conversation.hush());
$("clear").addEventListener("click", () => transcript.clear());
$("open-settings").addEventListener("click", () => settingsDialog.open(settings));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) conversation.hush();
});
for (const gesture of ["pointerdown", "keydown"]) addEventListener(gesture, () => conversation.wake());
document.addEventListener("visibilitychange", () => document.hidden || conversation.wake());
addEventListener("pagehide", () => conversation.isRunning && conversation.stop());

const why = whyNoAudio();
if (why) {
  $("start").disabled = true;
  $("hint").textContent = "A conversation needs a microphone.";
  problem.show(problemOfPage(why, location), { canDismiss: false });
}
