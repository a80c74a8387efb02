// What stands in the way before a conversation begins, in words that say what to do. No I/O.

/** For `whyNoAudio`. `place` is the page's location. */
export function problemOfPage(why, place) {
  if (why === "unsupported") {
    return {
      title: "This browser cannot do it",
      text: "The page needs a microphone and AudioWorklet: any current Chrome, Edge, Firefox or Safari has both.",
      steps: [],
    };
  }
  const port = place.port || "80";
  return {
    title: "The browser gives this page no microphone",
    text: `It was opened as ${place.origin}, without encryption and from another machine. Any of these helps:`,
    steps: [
      `On the server's own machine, open http://localhost:${port}.`,
      `From here, run  ssh -L ${port}:localhost:${port} ${place.hostname}  and open http://localhost:${port}.`,
      "Serve it over HTTPS: metronome serve --tls-cert chain.pem --tls-key key.pem, or a proxy in front of it.",
    ],
  };
}

const MICROPHONE = {
  NotAllowedError: [
    "The microphone is not allowed",
    "The browser, or the system behind it, said no. Allow it and start again:",
    [
      "In the address bar, open the site's settings and set Microphone to Allow.",
      "If it is allowed there: on macOS see System Settings, Privacy, Microphone; on Windows see Settings, Privacy, Microphone.",
    ],
  ],
  NotFoundError: ["No microphone was found", "Plug one in or switch a headset on, then start again.", []],
  NotReadableError: ["The microphone is busy", "Another program holds it. Close that one, then start again.", []],
};

/** For the DOMException of getUserMedia, or whatever else came. */
export function problemOfMicrophone(error) {
  const [title, text, steps] = MICROPHONE[error.name] ?? [
    "The microphone could not be opened",
    `The browser says: ${error.message || error.name}.`,
    [],
  ];
  return { title, text, steps };
}

export const LOST_MICROPHONE = {
  title: "The microphone went away",
  text: "It was unplugged, switched off or taken by another program. The conversation has ended; start again when it is back.",
  steps: [],
};
