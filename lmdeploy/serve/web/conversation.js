// The chat that is open: its messages, and the answer that streams from the server.

import { events, getJson } from "./api.js";
import { withFiles } from "./attachments.js";
import { add, newChat, path, select, siblings } from "./branches.js";
import { Stopwatch } from "./stopwatch.js";

const CURRENT = "chat"; // in the session storage, so that a reload opens it again
const TITLE_CHARS = 60;

/** A message of the assistant before it is generated. */
function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", toolCalls: [], stats: null, error: "", finish: null };
}

/** Return whether later questions include a message. Answers that failed or are empty are not sent. */
function isSent({ role, content, toolCalls, error }) {
  return role !== "assistant" || (!error && (content !== "" || toolCalls.length > 0));
}

/** Return whether the page was closed while an answer was generated. */
function isUnfinished({ role, error, finish }) {
  return role === "assistant" && !error && !finish;
}

/** Return the message as the API expects it. Reasoning is not sent back. */
function toApi(message) {
  const { role, toolCalls, toolCallId } = message;
  const content = withFiles(message);
  if (role === "tool") {
    return { role, tool_call_id: toolCallId, content };
  }
  if (!toolCalls?.length) {
    return { role, content };
  }
  const calls = toolCalls.map(({ id, name, arguments: text }) => {
    return { id, type: "function", function: { name, arguments: text } };
  });
  return { role, content, tool_calls: calls };
}

function addToolCalls(answer, deltas) {
  for (const { index, id, function: part } of deltas) {
    const call = (answer.toolCalls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
}

export class Conversation {
  messages = []; // of the selected branch
  chat = newChat();
  isReachable = true; // whether the server answers
  #abort = null;
  #card = null; // the promise of the server's description of its model
  #onChange;
  #options;
  #store;

  /** `onChange(message)` follows a change of one message, or of the list without an argument. */
  constructor({ onChange, options, store }) {
    this.#onChange = onChange;
    this.#options = options;
    this.#store = store;
  }

  /** Return the server's description of its model, for which it is asked until it answers. */
  async model() {
    const card = (this.#card ??= getJson("v1/models").then(({ data }) => data[0]));
    try {
      return await card;
    } catch (error) {
      if (this.#card === card) {
        this.#card = null;
      }
      throw error;
    }
  }

  /** Ask for the model again: another server may have taken the place of the one before. */
  forgetModel() {
    this.#card = null;
  }

  /** Whether a question can be sent now. */
  get isReady() {
    return this.isReachable && !this.isGenerating;
  }

  get isGenerating() {
    return this.#abort !== null;
  }

  /** Tokens of the messages, as of the last complete answer. */
  get tokens() {
    return this.messages.findLast(({ stats }) => stats?.total)?.stats.total ?? 0;
  }

  /** Open the chat that was open before the page was reloaded. */
  async restore() {
    const chat = await this.#store.get(sessionStorage.getItem(CURRENT) ?? "");
    if (chat && this.messages.length === 0) {
      this.open(chat);
    }
  }

  open(chat = newChat()) {
    this.#stopNow();
    this.chat = chat;
    chat.messages.filter(isUnfinished).forEach((message) => (message.finish = "stopped"));
    sessionStorage.setItem(CURRENT, chat.id);
    this.#show();
  }

  stop() {
    this.#abort?.abort();
  }

  #stopNow() {
    this.stop();
    this.#abort = null;
  }

  send(content, files = []) {
    const question = { role: "user", content, files };
    this.chat.title ||= (content.trim() || files[0].name).split("\n")[0].slice(0, TITLE_CHARS);
    return this.#answer(add(this.chat, question, this.messages.at(-1)));
  }

  /** Answer the last question again, beside the old answer. An empty one is replaced. */
  regenerate() {
    const last = this.messages.at(-1);
    const question = this.messages.findLast(({ role }) => role !== "assistant");
    const isEmpty = last.role === "assistant" && !last.content && !last.reasoning && !last.toolCalls.length;
    return this.#answer(question, isEmpty ? Object.assign(last, newAnswer()) : undefined);
  }

  /** Ask a changed question beside the old one. */
  edit({ parent, files }, content) {
    const before = this.chat.messages.find(({ id }) => id === parent);
    return this.#answer(add(this.chat, { role: "user", content, files }, before));
  }

  /** Send the result of each tool call of the last message. */
  sendToolResults(results) {
    let last = this.messages.at(-1);
    last.toolCalls.forEach(({ id, name }, i) => {
      last = add(this.chat, { role: "tool", toolCallId: id, name, content: results[i] }, last);
    });
    return this.#answer(last);
  }

  versions(message) {
    return siblings(this.chat, message);
  }

  /** Show another version of a message, and what followed it. */
  select(message) {
    this.#stopNow();
    select(this.chat, message);
    this.#show();
    this.#store.save(this.chat);
  }

  /** Keep the part of an answer that is there, because the page may be closed. */
  keep() {
    if (this.isGenerating) {
      this.#store.save(this.chat);
    }
  }

  #show() {
    this.messages = path(this.chat);
    this.#onChange();
  }

  /** REQUIRES: no answer is being generated, and `question` is on the selected branch. */
  async #answer(question, answer = add(this.chat, newAnswer(), question)) {
    const { chat } = this;
    const abort = (this.#abort = new AbortController());
    sessionStorage.setItem(CURRENT, chat.id);
    this.#show();
    this.#store.save(chat);
    const { system, ...sampling } = this.#options();
    const prompt = this.messages.slice(0, -1).filter(isSent).map(toApi);
    const body = {
      messages: system ? [{ role: "system", content: system }, ...prompt] : prompt,
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
      ...sampling,
    };
    try {
      body.model = (await this.model()).id;
      await this.#stream(answer, { body, signal: abort.signal });
    } catch (error) {
      answer.toolCalls = []; // they may be incomplete
      if (abort.signal.aborted) {
        answer.finish = "stopped";
      } else {
        answer.error = error.message;
      }
    }
    if (this.#abort === abort) {
      this.#abort = null; // else another answer has begun
    }
    this.#onChange(answer);
    await this.#store.save(chat);
  }

  async #stream(answer, request) {
    const watch = new Stopwatch();
    for await (const { choices, usage } of events("v1/chat/completions", request)) {
      for (const { delta, finish_reason: finish } of choices) {
        answer.content += delta.content ?? "";
        answer.reasoning += delta.reasoning_content ?? "";
        addToolCalls(answer, delta.tool_calls ?? []);
        watch.add(delta.gen_tokens?.length ?? 0);
        answer.finish = finish ?? answer.finish;
      }
      answer.stats = watch.stats();
      if (usage) {
        const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
        const { prompt_tokens: prompt, total_tokens: total } = usage;
        answer.stats = { ...answer.stats, prompt, cached, total };
      }
      this.#onChange(answer);
    }
  }
}
