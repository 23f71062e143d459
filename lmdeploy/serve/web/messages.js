// The list of messages: one article for each, updated while an answer streams.

import { button, copy, grow, make } from "./dom.js";
import { renderMarkdown, stableLength } from "./markdown.js";

const MIN_RENDER_MS = 250; // between two renderings of an answer that streams

export class MessageList {
  #root;
  #conversation;
  #views = new Map(); // message → view

  constructor(root, conversation) {
    this.#root = root;
    this.#conversation = conversation;
  }

  /** Show a change of one message, or of the list. */
  update(message) {
    if (message) {
      this.#views.get(message)?.update(this.#state(message));
      return;
    }
    const { messages } = this.#conversation;
    for (const [known, view] of this.#views) {
      if (!messages.includes(known)) {
        view.element.remove();
        this.#views.delete(known);
      }
    }
    for (const each of messages) {
      if (!this.#views.has(each)) {
        this.#views.set(each, this.#makeView(each));
        this.#root.append(this.#views.get(each).element);
      }
      this.#views.get(each).update(this.#state(each));
    }
  }

  #state(message) {
    const isLast = message === this.#conversation.messages.at(-1);
    return { isLast, isStreaming: isLast && this.#conversation.isGenerating };
  }

  #makeView(message) {
    if (message.role === "user") {
      return new QuestionView(message, this.#conversation);
    }
    const View = message.role === "tool" ? ToolResultView : AnswerView;
    return new View(message, this.#conversation);
  }
}

class QuestionView {
  #message;
  #conversation;
  #text;
  #actions;

  constructor(message, conversation) {
    this.#message = message;
    this.#conversation = conversation;
    this.#text = make("div", { class: "text" }, message.content);
    this.#actions = make(
      "div",
      { class: "actions" },
      button("Edit", () => this.#edit()),
    );
    const label = { class: "message question", "aria-label": "You" };
    this.element = make("article", label, this.#text, this.#actions);
  }

  update() {}

  #edit() {
    const field = make("textarea", { "aria-label": "Edit message", rows: 1 });
    field.value = this.#message.content;
    const close = () => {
      form.replaceWith(this.#text, this.#actions);
      this.#actions.querySelector("button").focus();
    };
    const submit = (event) => {
      event.preventDefault();
      if (field.value.trim() && !this.#conversation.isGenerating) {
        this.#conversation.edit(this.#message, field.value);
      }
    };
    const form = make(
      "form",
      { class: "edit", onsubmit: submit },
      field,
      make("button", { type: "submit", class: "primary" }, "Send"),
      button("Cancel", close),
    );
    field.addEventListener("input", () => grow(field));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (isSendKey(event)) {
        submit(event);
      }
    });
    this.#actions.remove();
    this.#text.replaceWith(form);
    grow(field);
    field.focus();
  }
}

class ToolResultView {
  constructor({ name, content }) {
    const title = make("p", { class: "label" }, `Result of ${name}`);
    const text = make("pre", { tabindex: 0 }, content);
    this.element = make("article", { class: "message tool-result" }, title, text);
  }

  update() {}
}

class AnswerView {
  #message;
  #conversation;
  #reasoning = make("div", { class: "text" });
  #reasoningTitle = make("summary");
  #details;
  #body = make("div", { class: "body" });
  #rendered = make("div", { class: "rendered" });
  #tail = make("p", { class: "tail" });
  #tools = make("div", { class: "tools" });
  #footer = make("footer");
  #length = 0; // characters of the content that are shown as Markdown
  #isRendering = false;
  #nextRender = 0;
  #tooLong = false;

  constructor(message, conversation) {
    this.#message = message;
    this.#conversation = conversation;
    this.#details = make("details", { class: "reasoning", hidden: true });
    this.#details.append(this.#reasoningTitle, this.#reasoning);
    this.#body.append(this.#rendered, this.#tail);
    this.element = make("article", { class: "message answer", "aria-label": "Answer" });
    this.element.append(this.#details, this.#body, this.#tools, this.#footer);
  }

  update({ isLast, isStreaming }) {
    const { content, reasoning, toolCalls } = this.#message;
    this.element.setAttribute("aria-busy", isStreaming);
    this.element.classList.toggle("waiting", isStreaming && !content && !reasoning);
    this.#details.hidden = reasoning === "";
    this.#reasoningTitle.textContent = isStreaming && !content ? "Reasoning…" : "Reasoning";
    this.#reasoning.textContent = reasoning;
    this.#tail.textContent = content.slice(this.#length);
    this.#render(isStreaming);
    this.#tools.replaceChildren(...toolCalls.map(toolCall));
    if (isLast && !isStreaming && toolCalls.length && !this.#message.error) {
      this.#tools.append(resultForm(toolCalls, this.#conversation));
    }
    this.#footer.replaceChildren(...this.#footerParts(isLast, isStreaming));
  }

  /** Render the blocks that are complete, or all when the answer has ended. */
  async #render(isStreaming) {
    const { content } = this.#message;
    const length = isStreaming ? stableLength(content) : content.length;
    if (this.#isRendering || this.#tooLong || length <= this.#length) {
      return;
    }
    if (isStreaming && performance.now() < this.#nextRender) {
      return;
    }
    this.#isRendering = true;
    try {
      this.#rendered.replaceChildren(...(await renderMarkdown(content.slice(0, length))));
      this.#length = length;
    } catch {
      this.#tooLong = true; // the text stays plain
    }
    this.#isRendering = false;
    this.#nextRender = performance.now() + MIN_RENDER_MS;
    this.#tail.textContent = this.#message.content.slice(this.#length);
    const { messages, isGenerating } = this.#conversation;
    this.#render(isGenerating && this.#message === messages.at(-1));
  }

  #footerParts(isLast, isStreaming) {
    const { content, error, finish, stats } = this.#message;
    const parts = [];
    if (error) {
      parts.push(make("p", { class: "error", role: "alert" }, error));
    }
    if (stats || finish === "stopped") {
      parts.push(make("p", { class: "stats" }, describe(stats, finish)));
    }
    if (!isStreaming) {
      const actions = make("div", { class: "actions" });
      if (content) {
        actions.append(button("Copy", ({ currentTarget }) => copy(content, currentTarget)));
      }
      if (isLast) {
        actions.append(button("Regenerate", () => this.#conversation.regenerate()));
      }
      parts.push(actions);
    }
    return parts;
  }
}

/** Return whether a key press in a text field sends it. */
export function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

function describe(stats, finish) {
  const parts = [];
  if (finish === "stopped") {
    parts.push("stopped");
  } else if (finish === "length") {
    parts.push("reached the limit of tokens");
  }
  if (stats?.tokens) {
    parts.push(`${stats.tokens.toLocaleString("en")} token${stats.tokens === 1 ? "" : "s"}`);
    if (stats.rate) {
      parts.push(`${stats.rate.toFixed(1)} tokens/s`);
    }
    parts.push(`first token after ${stats.firstToken.toFixed(2)} s`);
  }
  if (stats?.cached) {
    parts.push(`${stats.cached} of ${stats.prompt} prompt tokens from the cache`);
  }
  return parts.join(" · ");
}

function toolCall({ name, arguments: text }) {
  const title = make("p", { class: "label" }, "Tool call ", make("b", {}, name));
  return make("section", { class: "tool-call" }, title, make("pre", { tabindex: 0 }, pretty(text)));
}

/** Return JSON with indentation, or the text itself while it is incomplete. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function resultForm(toolCalls, conversation) {
  const fields = toolCalls.map(({ name }) => make("textarea", { rows: 2, name: `result of ${name}` }));
  const submit = (event) => {
    event.preventDefault();
    conversation.sendToolResults(fields.map(({ value }) => value));
  };
  const labels = fields.map((field, i) => make("label", {}, `Result of ${toolCalls[i].name}`, field));
  const send = make("button", { type: "submit" }, labels.length > 1 ? "Send results" : "Send result");
  return make("form", { class: "results", onsubmit: submit }, ...labels, send);
}
