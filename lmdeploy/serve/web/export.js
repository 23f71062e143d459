// Chats as files.

import { withFiles } from "./attachments.js";
import { path } from "./branches.js";
import { make } from "./dom.js";

/** Save a chat with all its branches as JSON. */
export function exportJson(chat) {
  const { title, created, updated, first, messages } = chat;
  const json = JSON.stringify({ title, created, updated, first, messages }, null, 2);
  download(`${fileName(chat)}.json`, "application/json", json);
}

/** Save the selected branch of a chat as Markdown. */
export function exportMarkdown(chat) {
  const parts = path(chat).map((message) => `## ${heading(message)}\n\n${text(message)}`);
  download(`${fileName(chat)}.md`, "text/markdown", `${[`# ${chat.title}`, ...parts].join("\n\n")}\n`);
}

function heading({ role, name }) {
  return { user: "Question", assistant: "Answer", tool: `Result of ${name}` }[role];
}

function text(message) {
  const calls = (message.toolCalls ?? []).map((call) => `Tool call \`${call.name}\`: \`${call.arguments}\``);
  return [withFiles(message), ...calls].filter((part) => part !== "").join("\n\n");
}

function fileName({ title }) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
}

function download(name, type, content) {
  const href = URL.createObjectURL(new Blob([content], { type }));
  make("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
