// The list of the chats that this browser keeps.

import { confirmDelete } from "./dialogs.js";
import { button, byId, formatBytes, make } from "./dom.js";
import { exportJson, exportMarkdown } from "./export.js";

export class ChatList {
  #root;
  #conversation;
  #store;
  #onOpen;

  /** `onOpen()` follows when the user opens a chat. */
  constructor(root, { conversation, store, onOpen }) {
    this.#root = root;
    this.#conversation = conversation;
    this.#store = store;
    this.#onOpen = onOpen;
    byId("delete-all").addEventListener("click", () => this.#deleteAll());
  }

  async update() {
    const chats = await this.#store.list();
    const { chat, messages } = this.#conversation;
    const isKept = chats.some(({ id }) => id === chat.id);
    const size = formatBytes(chats.reduce((sum, { bytes }) => sum + bytes, 0));
    byId("chats-note").textContent = chats.length
      ? `${size} in this browser. Nothing is kept on the server.`
      : "Conversations appear here. They stay in this browser.";
    byId("delete-all").hidden = chats.length === 0;
    if (this.#root.querySelector("form")) {
      return; // a chat is being renamed
    }
    const focused = document.activeElement?.dataset.key;
    const shown = isKept || messages.length === 0 ? chats : [chat, ...chats];
    this.#root.replaceChildren(...shown.map((each) => this.#item(each)));
    if (focused && document.activeElement === document.body) {
      this.#focus(focused);
    }
  }

  #focus(key) {
    this.#root.querySelector(`[data-key="${key}"]`)?.focus();
  }

  #item({ id, title }) {
    const isOpen = id === this.#conversation.chat.id;
    const name = title || "Without a title";
    const opens = button(name, () => this.#open(id), { class: "chat", "data-key": id, title: name });
    if (!isOpen) {
      return make("li", {}, opens);
    }
    opens.setAttribute("aria-current", "true");
    const { chat } = this.#conversation;
    const item = make("li", {}, opens);
    const action = (text, onclick, label) => {
      return button(text, onclick, { "data-key": `${id}-${text}`, "aria-label": `${label} ${name}` });
    };
    item.append(
      make(
        "div",
        { class: "actions" },
        action("Rename", () => this.#rename(item), "Rename"),
        action("Markdown", () => exportMarkdown(chat), "Export as Markdown:"),
        action("JSON", () => exportJson(chat), "Export as JSON:"),
        action("Delete", () => this.#delete(chat), "Delete"),
      ),
    );
    return item;
  }

  async #open(id) {
    const chat = await this.#store.get(id);
    if (chat) {
      this.#conversation.open(chat);
      this.#onOpen();
    }
    await this.update();
  }

  #rename(item) {
    const { chat } = this.#conversation;
    const field = make("input", { "aria-label": "Title", maxlength: 100 });
    field.value = chat.title;
    const close = async () => {
      form.remove();
      await this.update();
      this.#focus(`${chat.id}-Rename`);
    };
    const submit = async (event) => {
      event.preventDefault();
      chat.title = field.value.trim() || chat.title;
      form.remove();
      await this.#store.save(chat);
      await close();
    };
    const form = make("form", { class: "rename", onsubmit: submit }, field);
    form.append(make("button", { type: "submit" }, "Save"));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    item.replaceChildren(form);
    field.select();
  }

  async #delete(chat) {
    if (await confirmDelete(`“${chat.title}” is deleted from this browser, with all its versions.`)) {
      await this.#remove(chat.id);
    }
  }

  async #deleteAll() {
    const ids = (await this.#store.list()).map(({ id }) => id);
    if (await confirmDelete(`All ${ids.length} conversations are deleted from this browser.`)) {
      await this.#remove(...ids);
    }
  }

  async #remove(...ids) {
    if (ids.includes(this.#conversation.chat.id)) {
      this.#conversation.open();
    }
    await this.#store.remove(...ids);
    this.#onOpen();
  }
}
