// Elements of the page. Text is always set as text: no string ever becomes HTML.

const SVG = "http://www.w3.org/2000/svg";
const MATH = "http://www.w3.org/1998/Math/MathML";

export const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (value !== false && value !== null) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children);
  return element;
}

/** Make an element. `attributes` may have listeners, such as `onclick`. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function makeMath(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(MATH, tag), attributes, children);
}

export function button(text, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, text);
}

/** Let a textarea grow with its text. */
export function grow(textarea) {
  textarea.style.height = "auto";
  textarea.style.height = `${textarea.scrollHeight}px`;
}

export const whole = (value) => Math.round(value).toLocaleString("en");

/** Return bytes with a binary unit. */
export function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const level = Math.min(Math.max(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 0), 4);
  return `${(bytes / 1024 ** level).toFixed(level ? 1 : 0)} ${units[level]}`;
}

export async function copy(text, source) {
  const label = source.textContent;
  source.textContent = (await isCopied(text, source)) ? "Copied" : "Not allowed";
  setTimeout(() => (source.textContent = label), 1500);
}

/** Copy a text. Pages of other hosts without HTTPS have no clipboard, but may copy a selection. */
async function isCopied(text, source) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const field = make("textarea", { class: "hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  source.focus();
  return copied;
}

/** Return whether a key press in a text field sends it. */
export function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}
