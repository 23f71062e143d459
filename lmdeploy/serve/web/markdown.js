// Markdown: the server parses it into a tree, and this file makes elements of the tree.

import { getJson } from "./api.js";
import { button, copy, make } from "./dom.js";

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr br em strong s code table thead tbody tr th td".split(" "),
);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ALIGNMENTS = new Set(["left", "center", "right"]);

/** Return the elements of a Markdown text. */
export async function renderMarkdown(text) {
  const { nodes } = await getJson("render_markdown", { body: { text } });
  return toElements(nodes);
}

/** Return where the last block begins. The blocks before it no longer change. */
export function stableLength(text) {
  const end = text.lastIndexOf("\n\n");
  const fences = text.slice(0, Math.max(end, 0)).match(/^ {0,3}(```|~~~)/gm) ?? [];
  return end > 0 && fences.length % 2 === 0 ? end + 2 : 0;
}

function toElements(nodes) {
  return nodes.map((node) => (typeof node === "string" ? node : toElement(node)));
}

function toElement([tag, attributes, ...children]) {
  if (tag === "pre") {
    return codeBlock(attributes.language ?? "", String(children[0] ?? ""));
  }
  if (tag === "a") {
    return link(attributes, toElements(children));
  }
  if (!TAGS.has(tag)) {
    return make("span", {}, ...toElements(children));
  }
  const element = make(tag, {}, ...toElements(children));
  if (ALIGNMENTS.has(attributes.align)) {
    element.classList.add(attributes.align);
  }
  if (tag === "ol" && /^\d{1,9}$/.test(attributes.start)) {
    element.setAttribute("start", attributes.start);
  }
  return tag === "table" ? make("div", { class: "table", tabindex: 0 }, element) : element;
}

function link({ href, title }, children) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!SCHEMES.has(url?.protocol)) {
    return make("span", {}, ...children);
  }
  const rel = "noopener noreferrer";
  return make("a", { href: url.href, title: title ?? null, rel, target: "_blank" }, ...children);
}

function codeBlock(language, text) {
  const copies = button("Copy", ({ currentTarget }) => copy(text, currentTarget));
  const head = make("div", { class: "code-head" }, make("span", {}, language), copies);
  const code = make("pre", { tabindex: 0 }, make("code", {}, text));
  return make("div", { class: "code" }, head, code);
}
