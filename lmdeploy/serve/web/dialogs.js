// Modal dialogs. The browser keeps the focus inside, and returns it when they close.

import { setKey } from "./api.js";
import { byId } from "./dom.js";

/** Open a dialog. Return whether its form was sent. */
function ask(dialog, onSubmit = () => {}) {
  dialog.onclose?.(); // The browser sends `close` late: perhaps after the dialog is open again.
  dialog.showModal();
  return new Promise((resolve) => {
    let isSent = false;
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      onSubmit();
      isSent = true;
      dialog.close();
    };
    dialog.onclose = () => dialog.open || resolve(isSent);
  });
}

export function askForKey(wasWrong) {
  byId("key-error").textContent = wasWrong ? "The server does not accept this key." : "";
  byId("key").value = "";
  return ask(byId("key-dialog"), () => setKey(byId("key").value.trim()));
}

/** Ask whether something shall be deleted that cannot come back. */
export function confirmDelete(what) {
  byId("delete-what").textContent = what;
  return ask(byId("delete-dialog"));
}

byId("delete-cancel").addEventListener("click", () => byId("delete-dialog").close());
