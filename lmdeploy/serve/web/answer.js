// One answer of the assistant, updated while it streams.

import { button, copy, make, whole } from "./dom.js";
import { renderMarkdown, stableLength } from "./markdown.js";
import { versionArrows } from "./versions.js";

const MIN_RENDER_MS = 250; // between two renderings of an answer that streams

export class AnswerView {
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
  #isTooLong = false;

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
    if (this.#isRendering || this.#isTooLong || length <= this.#length) {
      return;
    }
    if (isStreaming && performance.now() < this.#nextRender) {
      return;
    }
    this.#isRendering = true;
    try {
      this.#rendered.replaceChildren(...(await renderMarkdown(content.slice(0, length))));
      this.#length = length;
    } catch (error) {
      this.#isRendering = false; // the text stays plain, until the server is back
      this.#isTooLong = error.status !== 0;
      return;
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
      const actions = make("div", { class: "actions" }, ...versionArrows(this.#message, this.#conversation));
      if (content) {
        actions.append(button("Copy", ({ currentTarget }) => copy(content, currentTarget)));
      }
      if (isLast) {
        const disabled = !this.#conversation.isReady;
        actions.append(button("Regenerate", () => this.#conversation.regenerate(), { disabled }));
      }
      parts.push(actions);
    }
    return parts;
  }
}

function oneDigit(value) {
  return value.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
}

function describe(stats, finish) {
  const parts = [];
  if (finish === "stopped") {
    parts.push("stopped");
  } else if (finish === "length") {
    parts.push("reached the limit of tokens");
  }
  if (stats?.tokens) {
    parts.push(`${whole(stats.tokens)} token${stats.tokens === 1 ? "" : "s"}`);
    if (stats.rate) {
      parts.push(`${oneDigit(stats.rate)} tokens/s`);
    }
    parts.push(`first token after ${stats.firstToken.toFixed(2)} s`);
  }
  if (stats?.cached) {
    parts.push(`${whole(stats.cached)} of ${whole(stats.prompt)} prompt tokens from the cache`);
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
