// Starts the page and connects its parts: composer, keyboard, panels and the key dialog.

import { onMissingKey, setKey } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, grow } from "./dom.js";
import { EngineView } from "./engine.js";
import { MessageList, isSendKey } from "./messages.js";
import { Settings } from "./settings.js";

const NARROW = matchMedia("(max-width: 60rem)");
const HAS_KEYBOARD = matchMedia("(hover: hover)");
const NEAR_END = 40; // pixels: so close to the end, the view follows the answer

const settings = new Settings(byId("settings-form"));
const conversation = new Conversation({
  onChange: (message) => changed(message),
  options: () => settings.values(),
});
const list = new MessageList(byId("messages"), conversation);
const engine = new EngineView(conversation);
const prompt = byId("prompt");
let wasGenerating = false;
let frame = 0;

/** Keep the end of the conversation in view until the user scrolls up. Return a function that scrolls there. */
function followEnd(scroller) {
  let last = 0;
  let follows = true;
  scroller.addEventListener("scroll", () => {
    const rest = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    follows = rest < NEAR_END || (follows && scroller.scrollTop >= last);
    last = scroller.scrollTop;
  });
  const toEnd = () => {
    follows = true;
    scroller.scrollTop = scroller.scrollHeight;
  };
  const observer = new ResizeObserver(() => follows && toEnd());
  observer.observe(byId("messages"));
  observer.observe(scroller);
  return toEnd;
}

const scrollToEnd = followEnd(byId("scroller"));

/** Show a change: while an answer streams, at most once per frame. */
function changed(message) {
  if (message && conversation.isGenerating) {
    frame ||= requestAnimationFrame(() => show(message));
    return;
  }
  show(message);
}

function show(message) {
  cancelAnimationFrame(frame);
  frame = 0;
  list.update(message);
  byId("welcome").hidden = conversation.messages.length > 0;
  if (!message) {
    scrollToEnd();
  }
  const { isGenerating } = conversation;
  if (isGenerating !== wasGenerating) {
    wasGenerating = isGenerating;
    byId("send").textContent = isGenerating ? "Stop" : "Send";
    const { error, finish } = conversation.messages.at(-1) ?? {};
    const end = error ? "" : finish === "stopped" ? "Stopped" : "Done";
    byId("status").textContent = isGenerating ? "Answering" : end;
    engine.poll();
  }
  if (document.activeElement === document.body && HAS_KEYBOARD.matches) {
    prompt.focus(); // the button that had the focus is gone
  }
}

function send() {
  const text = prompt.value;
  const problem = settings.problem();
  byId("status").textContent = problem;
  if (text.trim() === "" || problem || conversation.isGenerating) {
    return;
  }
  prompt.value = "";
  grow(prompt);
  conversation.send(text);
}

/** Ask for the key in a dialog. */
function askForKey(wasWrong) {
  const dialog = byId("key-dialog");
  byId("key-error").textContent = wasWrong ? "The server does not accept this key." : "";
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let isGiven = false;
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      setKey(byId("key").value.trim());
      isGiven = true;
      dialog.close();
    };
    dialog.onclose = () => resolve(isGiven);
  });
}

const panels = { settings: byId("toggle-settings"), engine: byId("toggle-engine") };

function showPanel(name, isShown) {
  for (const [each, toggle] of Object.entries(panels)) {
    if (each === name || (isShown && NARROW.matches)) {
      byId(each).hidden = each !== name || !isShown;
      toggle.setAttribute("aria-expanded", !byId(each).hidden);
    }
  }
}

for (const [name, toggle] of Object.entries(panels)) {
  toggle.addEventListener("click", () => showPanel(name, byId(name).hidden));
}
showPanel("engine", !NARROW.matches);

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  conversation.isGenerating ? conversation.stop() : send();
});
prompt.addEventListener("keydown", (event) => {
  if (isSendKey(event)) {
    event.preventDefault();
    send();
  }
});
prompt.addEventListener("input", () => grow(prompt));
byId("new-chat").addEventListener("click", () => {
  conversation.clear();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    conversation.stop();
  }
});

onMissingKey(askForKey);
changed();
try {
  const model = await conversation.modelName();
  byId("model").textContent = model;
  document.title = `${model} · lmdeploy-fp4`;
} catch (error) {
  byId("status").textContent = error.message;
}
engine.poll();
