// Markdown: the server parses it into a tree, and this file makes elements of the tree.

import { getJson } from "./api.js";
import { button, copy, make, makeMath } from "./dom.js";

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr br em strong s code table thead tbody tr th td".split(" "),
);
const CODE_KINDS = new Set("keyword name string number comment inserted deleted".split(" "));
const MATH_TAGS = new Set(
  ("math mrow mi mn mo ms mtext mspace mstyle mpadded msup msub msubsup mover munder munderover mmultiscripts " +
    "mprescripts none mfrac msqrt mroot mtable mtr mtd mphantom menclose").split(" "),
);
const MATH_ATTRIBUTES = new Set(
  ("display displaystyle scriptlevel mathvariant linethickness notation stretchy fence form separator symmetric " +
    "largeop movablelimits accent accentunder lspace rspace width minsize maxsize columnalign columnlines " +
    "rowlines").split(" "),
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
    return codeBlock(attributes.language ?? "", children);
  }
  if (tag === "a") {
    return link(attributes, toElements(children));
  }
  if (MATH_TAGS.has(tag)) {
    return tag === "math" ? formula(attributes, children) : mathElement(tag, attributes, children);
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
  return tag === "table" ? scrollable("table", "Table", element) : element;
}

/** Return a box that scrolls, also by keyboard, if its content is too wide. */
function scrollable(name, label, content) {
  return make("div", { class: name, tabindex: 0, role: "group", "aria-label": label }, content);
}

function link({ href, title }, children) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!SCHEMES.has(url?.protocol)) {
    return make("span", {}, ...children);
  }
  const rel = "noopener noreferrer";
  return make("a", { href: url.href, title: title ?? null, rel, target: "_blank" }, ...children);
}

function codeBlock(language, parts) {
  const spans = parts.map((part) => (typeof part === "string" ? part : codeSpan(part)));
  const code = make("code", {}, ...spans);
  const copies = button("Copy", ({ currentTarget }) => copy(code.textContent, currentTarget));
  const head = make("div", { class: "code-head" }, make("span", {}, language), copies);
  const label = language ? `Code in ${language}` : "Code";
  return make("div", { class: "code" }, head, make("pre", { tabindex: 0, role: "region", "aria-label": label }, code));
}

function codeSpan([, { kind }, text]) {
  return make("span", CODE_KINDS.has(kind) ? { class: `code-${kind}` } : {}, String(text));
}

/** Return a formula. One in a line of its own scrolls if it is too wide. */
function formula(attributes, children) {
  const math = mathElement("math", attributes, children);
  const isBlock = attributes.display === "block";
  return isBlock ? scrollable("formula", "Formula", math) : math;
}

function mathElement(tag, attributes, children) {
  const kept = Object.entries(attributes).filter(([name]) => MATH_ATTRIBUTES.has(name));
  const inner = children.map((child) => {
    const isText = typeof child === "string";
    return isText ? child : mathElement(MATH_TAGS.has(child[0]) ? child[0] : "mrow", child[1], child.slice(2));
  });
  return makeMath(tag, Object.fromEntries(kept), ...inner);
}
