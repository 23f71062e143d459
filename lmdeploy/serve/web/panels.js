// The panels beside the conversation. On a narrow page they cover it, one at a time.

import { byId } from "./dom.js";

const NARROW = matchMedia("(max-width: 60rem)");
const MEDIUM = matchMedia("(max-width: 90rem)"); // has room for two panels
const NAMES = ["chats", "settings", "engine"];

const toggleOf = (name) => byId(`toggle-${name}`);

function set(name, isShown) {
  byId(name).hidden = !isShown;
  toggleOf(name).setAttribute("aria-expanded", isShown);
}

function show(name) {
  const others = NAMES.filter((other) => other !== name && !byId(other).hidden);
  const most = NARROW.matches ? 0 : MEDIUM.matches ? 1 : 2;
  others.slice(0, others.length - most).forEach((other) => set(other, false));
  set(name, true);
}

/** Close the panels that cover the conversation, and return whether there was one. */
export function closeCovering() {
  const open = NARROW.matches ? NAMES.find((name) => !byId(name).hidden) : undefined;
  if (open) {
    set(open, false);
    toggleOf(open).focus();
  }
  return open !== undefined;
}

for (const name of NAMES) {
  toggleOf(name).addEventListener("click", () => (byId(name).hidden ? show(name) : set(name, false)));
}
set("chats", !NARROW.matches);
set("engine", !NARROW.matches);
