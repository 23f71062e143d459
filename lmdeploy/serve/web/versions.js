// The arrows between the versions of a message.

import { button, make } from "./dom.js";

/** Return ‹ 2/3 ›, or nothing if the message has one version. */
export function versionArrows(message, conversation) {
  const versions = conversation.versions(message);
  const place = versions.indexOf(message);
  if (versions.length < 2) {
    return [];
  }
  const arrow = (text, step, name) => {
    const other = versions[place + step];
    const show = () => {
      conversation.select(other);
      focusArrow(other, name);
    };
    const label = name === "next" ? "Next version" : "Previous version";
    return button(text, show, { "aria-label": label, disabled: !other, "data-arrow": `${name}-${message.id}` });
  };
  const count = make("span", {}, `${place + 1}/${versions.length}`);
  const group = { class: "versions", role: "group", "aria-label": `Version ${place + 1} of ${versions.length}` };
  return [make("div", group, arrow("‹", -1, "previous"), count, arrow("›", 1, "next"))];
}

/** Focus the same arrow of the version that is now shown, or the other one at the end. */
function focusArrow({ id }, name) {
  const find = (which) => document.querySelector(`[data-arrow="${which}-${id}"]:not(:disabled)`);
  (find(name) ?? find(name === "next" ? "previous" : "next"))?.focus();
}
