// Elements of the page. Text is always set as text: no string ever becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

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

export function button(text, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, text);
}

/** Let a textarea grow with its text. */
export function grow(textarea) {
  textarea.style.height = "auto";
  textarea.style.height = `${textarea.scrollHeight}px`;
}

export async function copy(text, source) {
  const label = source.textContent;
  try {
    await navigator.clipboard.writeText(text);
    source.textContent = "Copied";
  } catch {
    source.textContent = "Not allowed";
  }
  setTimeout(() => (source.textContent = label), 1500);
}
