// Text files that are sent as a part of a question.

import { button, byId, formatBytes, make } from "./dom.js";

const MAX_FILES = 8;
const MAX_FILE_BYTES = 256 * 1024;

/** Return the content of a message, followed by its files. */
export function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
    const fence = "`".repeat(longest + 1);
    return `File \`${name}\`:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [content, ...parts].filter((part) => part !== "").join("\n\n");
}

function nameAndSize({ name, text }) {
  const size = formatBytes(new Blob([text]).size);
  return [make("span", { class: "file-name", title: name }, name), make("small", {}, size)];
}

/** Return a chip that opens to show the text of a file. */
export function fileChip({ name, text }) {
  const title = make("summary", {}, ...nameAndSize({ name, text }));
  return make("details", { class: "file" }, title, make("pre", { tabindex: 0 }, text));
}

async function readText(file) {
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(`${file.name} has ${formatBytes(file.size)}. A file may have ${formatBytes(MAX_FILE_BYTES)}.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) {
      return { name: file.name.replace(/[`\n]/g, " "), text };
    }
  } catch {
    // not UTF-8
  }
  throw new Error(`${file.name} is no text file in UTF-8.`);
}

export class Attachments {
  #root;
  #files = [];
  #onProblem;

  constructor(root, { onProblem }) {
    this.#root = root;
    this.#onProblem = onProblem;
  }

  get isEmpty() {
    return this.#files.length === 0;
  }

  async add(files) {
    for (const file of files) {
      try {
        if (this.#files.length >= MAX_FILES) {
          throw new Error(`A message may have ${MAX_FILES} files.`);
        }
        this.#files.push(await readText(file));
      } catch (error) {
        this.#onProblem(error.message);
      }
    }
    this.#show();
  }

  /** Return the files and forget them. */
  take() {
    const taken = this.#files;
    this.#files = [];
    this.#show();
    return taken;
  }

  #show() {
    const chips = this.#files.map((file) => {
      const remove = () => {
        this.#files = this.#files.filter((each) => each !== file);
        this.#show();
        (this.#root.querySelector("button") ?? byId("prompt")).focus();
      };
      const cross = button("×", remove, { "aria-label": `Remove ${file.name}` });
      return make("li", { class: "chip" }, ...nameAndSize(file), cross);
    });
    this.#root.replaceChildren(...chips);
  }
}
