// The settings of a request. An empty field is left out, so that the server uses its default.

import { whole } from "./dom.js";
import { makePresets } from "./presets.js";

const STORED = "settings";
const TEXTS = new Set(["system", "reasoning_effort"]);

export class Settings {
  #form;
  #presets;

  constructor(form) {
    this.#form = form;
    this.#presets = makePresets(form);
    const stored = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    for (const [name, value] of Object.entries(stored)) {
      const field = form.elements.namedItem(name);
      if (field) {
        field.value = value;
      }
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => this.#changed());
    form.addEventListener("reset", () => setTimeout(() => this.#changed()));
    this.#changed();
  }

  /** Show the values that the server uses for empty fields. */
  showDefaults({ max_model_len: maxTokens, default_generation_settings: defaults }) {
    const { do_sample: isSampled, ...values } = defaults;
    for (const [name, value] of Object.entries(values)) {
      this.#form.elements.namedItem(name)?.setAttribute("placeholder", value);
    }
    if (!isSampled) {
      this.#form.elements.temperature.placeholder = "greedy";
    }
    this.#form.elements.max_tokens.placeholder = `up to ${whole(maxTokens)}`;
  }

  /** Return an empty string, or what is wrong with the first wrong field. */
  problem() {
    const field = this.#form.querySelector(":invalid");
    return field ? `${field.labels[0].firstChild.textContent.trim()}: ${field.validationMessage}` : "";
  }

  /** Return `system` and the fields of the request. REQUIRES: there is no problem. */
  values() {
    const values = {};
    for (const [name, text] of new FormData(this.#form)) {
      if (text.trim() !== "") {
        values[name] = parse(name, text);
      }
    }
    return values;
  }

  #changed() {
    const tools = this.#form.elements.tools;
    let isList = true;
    if (tools.value.trim() !== "") {
      try {
        isList = Array.isArray(JSON.parse(tools.value));
      } catch {
        isList = false;
      }
    }
    tools.setCustomValidity(isList ? "" : "This is not a JSON list.");
    const entries = Object.fromEntries(new FormData(this.#form));
    localStorage.setItem(STORED, JSON.stringify(entries));
    this.#presets.forEach((preset) => preset.show());
  }
}

function parse(name, text) {
  if (name === "stop") {
    return text.split("\n").filter((word) => word !== "");
  }
  return TEXTS.has(name) ? text : JSON.parse(text);
}
