// The list of messages: one article for each, updated while an answer streams.

import { AnswerView } from "./answer.js";
import { fileChip } from "./attachments.js";
import { button, grow, isSendKey, make } from "./dom.js";
import { versionArrows } from "./versions.js";

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
    this.#text = make("div", { class: "text", hidden: message.content === "" }, message.content);
    this.#actions = make("div", { class: "actions" });
    const label = { class: "message question", "aria-label": "You" };
    const files = (message.files ?? []).map(fileChip);
    this.element = make("article", label, ...files, this.#text, this.#actions);
  }

  update() {
    const edit = button("Edit", () => this.#edit(), { class: "edit-button" });
    this.#actions.replaceChildren(...versionArrows(this.#message, this.#conversation), edit);
  }

  #edit() {
    const field = make("textarea", { "aria-label": "Edit message", rows: 1 });
    field.value = this.#message.content;
    const close = () => {
      form.replaceWith(this.#text, this.#actions);
      this.#actions.querySelector(".edit-button").focus();
    };
    const submit = (event) => {
      event.preventDefault();
      if (field.value.trim() && this.#conversation.isReady) {
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
  #message;
  #conversation;
  #versions = make("div");

  constructor(message, conversation) {
    this.#message = message;
    this.#conversation = conversation;
    const title = make("p", { class: "label" }, `Result of ${message.name}`);
    const text = make("pre", { tabindex: 0 }, message.content);
    this.element = make("article", { class: "message tool-result" }, title, text, this.#versions);
  }

  update() {
    this.#versions.replaceChildren(...versionArrows(this.#message, this.#conversation));
  }
}
