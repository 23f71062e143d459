// The conversation: its messages, and the answer that streams from the server.

import { events, getJson } from "./api.js";

const STORED = "conversation";

/** A message of the assistant while it is generated. */
function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", toolCalls: [], stats: null, error: "" };
}

/** Return whether later questions include a message. Answers that failed or are empty are not sent. */
function isSent({ role, content, toolCalls, error }) {
  return role !== "assistant" || (!error && (content !== "" || toolCalls.length > 0));
}

/** Return the message as the API expects it. Reasoning is not sent back. */
function toApi({ role, content, toolCalls, toolCallId }) {
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

/** Measures an answer: time to the first token and tokens per second after it. */
class Stopwatch {
  #start = performance.now();
  #first = 0;
  #last = 0;
  #tokens = 0;
  #firstTokens = 0;

  add(numTokens) {
    if (numTokens === 0) {
      return;
    }
    this.#last = performance.now();
    if (this.#first === 0) {
      this.#first = this.#last;
      this.#firstTokens = numTokens;
    }
    this.#tokens += numTokens;
  }

  stats() {
    if (this.#first === 0) {
      return null;
    }
    const seconds = (this.#last - this.#first) / 1000;
    const rate = seconds > 0 ? (this.#tokens - this.#firstTokens) / seconds : null;
    return { tokens: this.#tokens, rate, firstToken: (this.#first - this.#start) / 1000 };
  }
}

export class Conversation {
  messages = [];
  tokens = 0; // of the whole conversation, as of the last complete answer
  #abort = null;
  #model = "";
  #onChange;
  #options;

  /** `onChange(message)` follows a change of one message, or of the list without an argument. */
  constructor({ onChange, options }) {
    this.#onChange = onChange;
    this.#options = options;
    try {
      const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
      Object.assign(this, stored && { messages: stored.messages, tokens: stored.tokens });
    } catch {
      sessionStorage.removeItem(STORED);
    }
  }

  /** Return the name of the model, for which the server is asked until it answers. */
  async modelName() {
    if (!this.#model) {
      const { data } = await getJson("v1/models");
      this.#model = data[0].id;
    }
    return this.#model;
  }

  get isGenerating() {
    return this.#abort !== null;
  }

  clear() {
    this.stop();
    this.#replace([]);
    this.tokens = 0;
    this.#save();
  }

  stop() {
    this.#abort?.abort();
  }

  send(content) {
    return this.#generate([...this.messages, { role: "user", content }]);
  }

  /** Answer the last question again. */
  regenerate() {
    const last = this.messages.findLastIndex(({ role }) => role !== "assistant");
    return this.#generate(this.messages.slice(0, last + 1));
  }

  /** Replace a question. What follows it is removed, and it is answered again. */
  edit(message, content) {
    const kept = this.messages.slice(0, this.messages.indexOf(message));
    return this.#generate([...kept, { role: "user", content }]);
  }

  /** Send the result of each tool call of the last message. */
  sendToolResults(results) {
    const { toolCalls } = this.messages.at(-1);
    const added = toolCalls.map(({ id, name }, i) => {
      return { role: "tool", toolCallId: id, name, content: results[i] };
    });
    return this.#generate([...this.messages, ...added]);
  }

  #replace(messages) {
    this.messages = messages;
    this.#onChange();
  }

  #save() {
    try {
      const { messages, tokens } = this;
      sessionStorage.setItem(STORED, JSON.stringify({ messages, tokens }));
    } catch {
      sessionStorage.removeItem(STORED); // too long: a reload starts a new conversation
    }
  }

  async #generate(history) {
    if (this.isGenerating) {
      return;
    }
    const { system, ...sampling } = this.#options();
    const prompt = history.filter(isSent).map(toApi);
    const body = {
      messages: system ? [{ role: "system", content: system }, ...prompt] : prompt,
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
      ...sampling,
    };
    const answer = newAnswer();
    const abort = (this.#abort = new AbortController());
    this.#replace([...history, answer]);
    try {
      body.model = await this.modelName();
      await this.#stream(answer, { body, signal: abort.signal });
    } catch (error) {
      answer.toolCalls = []; // they may be incomplete
      if (abort.signal.aborted) {
        answer.finish = "stopped";
      } else {
        answer.error = error.message;
      }
    }
    this.#abort = null;
    this.#onChange(answer);
    this.#save();
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
        answer.stats = { ...answer.stats, prompt: usage.prompt_tokens, cached };
        this.tokens = usage.total_tokens;
      }
      this.#onChange(answer);
    }
  }
}
