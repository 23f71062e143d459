// A chat as plain data, which the browser can store. Its messages are a tree: an edited question and
// another answer stand beside the old ones. `chat.first` and `message.next` name the selected branch.

/** Return a name that no other message or chat has. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newChat() {
  return { id: newId(), title: "", created: Date.now(), updated: 0, bytes: 0, first: null, messages: [] };
}

/** Return the messages of the selected branch. */
export function path(chat) {
  const byId = new Map(chat.messages.map((message) => [message.id, message]));
  const found = [];
  let message = byId.get(chat.first);
  while (message) {
    found.push(message);
    message = byId.get(message.next);
  }
  return found;
}

/** Add a message after `parent`, which is null for the first one, and select it. */
export function add(chat, message, parent) {
  Object.assign(message, { id: newId(), parent: parent?.id ?? null, next: null });
  chat.messages.push(message);
  select(chat, message);
  return message;
}

/** Return the message and those that stand beside it, the oldest first. */
export function siblings(chat, { parent }) {
  return chat.messages.filter((message) => message.parent === parent);
}

export function select(chat, message) {
  const parent = chat.messages.find(({ id }) => id === message.parent);
  Object.assign(parent ?? chat, { [parent ? "next" : "first"]: message.id });
}
