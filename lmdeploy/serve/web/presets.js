// Presets: named values of several settings.

const SAMPLING = {
  Exact: { temperature: "0" },
  Balanced: { temperature: "0.7", top_p: "0.9" },
  Creative: { temperature: "1.1", min_p: "0.05" },
};
const REASONING = {
  Off: { enable_thinking: "false" },
  Short: { enable_thinking: "true", reasoning_effort: "low" },
  Thorough: { enable_thinking: "true", reasoning_effort: "high" },
};
const DEFAULT = "Default";
const CUSTOM = "Custom";

class Preset {
  #form;
  #select;
  #presets;
  #names; // of the settings that the presets have

  constructor(form, select, presets) {
    this.#form = form;
    this.#select = select;
    this.#presets = { [DEFAULT]: {}, ...presets };
    this.#names = [...new Set(Object.values(presets).flatMap(Object.keys))];
    const options = [...Object.keys(this.#presets), CUSTOM];
    select.replaceChildren(...options.map((text) => new Option(text)));
    select.options[options.length - 1].disabled = true;
    select.addEventListener("input", () => this.#apply());
  }

  #apply() {
    for (const name of this.#names) {
      this.#form.elements[name].value = this.#presets[this.#select.value][name] ?? "";
    }
  }

  /** Show the preset that has the values of the form. */
  show() {
    const isEqual = (values) => {
      return this.#names.every((name) => this.#form.elements[name].value === (values[name] ?? ""));
    };
    const found = Object.keys(this.#presets).find((name) => isEqual(this.#presets[name]));
    this.#select.value = found ?? CUSTOM;
  }
}

/** Return the presets of a form of settings. */
export function makePresets(form) {
  return [
    new Preset(form, form.querySelector("#sampling-preset"), SAMPLING),
    new Preset(form, form.querySelector("#reasoning-preset"), REASONING),
  ];
}
