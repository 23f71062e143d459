// Starts the page and connects its parts.

import { onLostServer, onMissingKey } from "./api.js";
import { Attachments } from "./attachments.js";
import { ChatList } from "./chats.js";
import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { askForKey } from "./dialogs.js";
import { byId, grow, isSendKey, whole } from "./dom.js";
import { EngineView } from "./engine.js";
import { MessageList } from "./messages.js";
import { closeCovering } from "./panels.js";
import { followEnd } from "./scrolling.js";
import { Settings } from "./settings.js";
import { ChatStore } from "./store.js";

const HAS_KEYBOARD = matchMedia("(hover: hover)");
const MAX_SPOKEN_CHARS = 2000;
const NEARLY_FULL = 0.9; // of the context

const prompt = byId("prompt");
const setStatus = (text) => (byId("status").textContent = text);
const settings = new Settings(byId("settings-form"));
const store = new ChatStore({
  onChange: () => chats.update(),
  onProblem: (text) => (byId("store-problem").textContent = text),
});
const conversation = new Conversation({
  onChange: (message) => changed(message),
  options: () => settings.values(),
  store,
});
const chats = new ChatList(byId("chat-list"), { conversation, store, onOpen: () => opened() });
const list = new MessageList(byId("messages"), conversation);
const engine = new EngineView(conversation);
const connection = new Connection({ onChange: () => connectionChanged() });
const attachments = new Attachments(byId("files"), { onProblem: setStatus });
const scrollToEnd = followEnd(byId("scroller"), byId("messages"));
let maxTokens = 0; // of the context
let wasGenerating = false;
let frame = 0;

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
    chats.update();
    engine.show();
  }
  if (conversation.isGenerating !== wasGenerating) {
    wasGenerating = conversation.isGenerating;
    showGenerating(message);
  }
  showContext();
  if (document.activeElement === document.body && HAS_KEYBOARD.matches) {
    prompt.focus(); // the button that had the focus is gone
  }
}

/** Show the begin or the end of an answer. `answer` is missing when another chat or version is shown. */
function showGenerating(answer) {
  const { isGenerating } = conversation;
  const { content = "", error, finish } = answer ?? {};
  byId("send").textContent = isGenerating ? "Stop" : "Send";
  showSend();
  setStatus(isGenerating ? "Answering" : !answer || error ? "" : finish === "stopped" ? "Stopped" : "Done");
  byId("spoken").textContent = isGenerating ? "" : content.slice(0, MAX_SPOKEN_CHARS);
  engine.poll();
}

function showContext() {
  const { tokens } = conversation;
  byId("context").textContent = maxTokens ? `${whole(tokens)} of ${whole(maxTokens)} tokens` : "";
  byId("context").classList.toggle("full", tokens > NEARLY_FULL * maxTokens);
}

function showSend() {
  byId("send").disabled = !conversation.isReady && !conversation.isGenerating;
}

async function connectionChanged() {
  byId("banner").textContent = connection.problem;
  conversation.isReachable = connection.problem === "";
  list.update();
  showSend();
  setStatus(connection.problem ? "" : "The server answers again.");
  if (!connection.problem) {
    conversation.forgetModel();
    await showModel();
  }
  engine.poll();
}

async function showModel() {
  try {
    const model = await conversation.model();
    maxTokens = model.max_model_len;
    byId("model").textContent = model.id;
    document.title = `${model.id} · lmdeploy-fp4`;
    settings.showDefaults(model);
    showContext();
  } catch (error) {
    setStatus(error.message);
  }
}

function send() {
  const text = prompt.value;
  const problem = settings.problem();
  const isEmpty = text.trim() === "" && attachments.isEmpty;
  setStatus(problem);
  if (isEmpty || problem || !conversation.isReady) {
    return;
  }
  prompt.value = "";
  grow(prompt);
  conversation.send(text, attachments.take());
}

/** Follow the choice of a chat. */
function opened() {
  closeCovering();
  prompt.focus();
}

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
prompt.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length > 0) {
    event.preventDefault();
    attachments.add(event.clipboardData.files);
  }
});
byId("attach").addEventListener("click", () => byId("file-input").click());
byId("file-input").addEventListener("change", async ({ currentTarget }) => {
  await attachments.add(currentTarget.files);
  currentTarget.value = "";
  prompt.focus();
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (event.dataTransfer.types.includes("Files")) {
      event.preventDefault();
      attachments.add(event.dataTransfer.files); // none before the drop
    }
  });
}
document.addEventListener("visibilitychange", () => document.hidden && conversation.keep());
byId("new-chat").addEventListener("click", () => {
  conversation.open();
  opened();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]") && !closeCovering()) {
    conversation.stop();
  }
});

onMissingKey(askForKey);
onLostServer(() => connection.check());
changed();
await conversation.restore();
await showModel();
engine.poll();
