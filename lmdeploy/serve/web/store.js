// The chats that this browser keeps, in IndexedDB.

const MAX_BYTES = 64 * 2 ** 20;
const NAME = "chats";
const SUMMARY = "summary"; // an index whose keys are read without reading the chats

const done = (request) => {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
};

async function open() {
  const request = indexedDB.open("lmdeploy", 1);
  request.onupgradeneeded = () => {
    const store = request.result.createObjectStore(NAME, { keyPath: "id" });
    store.createIndex(SUMMARY, ["updated", "title", "bytes"]);
  };
  return done(request);
}

/** Return id, title, time and size of each chat, the newest first. */
function summaries(store) {
  const found = [];
  const request = store.index(SUMMARY).openKeyCursor(null, "prev");
  return new Promise((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) {
        resolve(found);
        return;
      }
      const [updated, title, bytes] = cursor.key;
      found.push({ id: cursor.primaryKey, updated, title, bytes });
      cursor.continue();
    };
  });
}

export class ChatStore {
  #opened = open();
  #removed = new Set(); // an answer that ends later must not bring a removed chat back
  #otherTabs = new BroadcastChannel(NAME);
  #onChange;
  #onProblem;

  /** `onChange()` follows each change, also one in another tab. `onProblem(text)` says why nothing is kept. */
  constructor({ onChange, onProblem }) {
    this.#onChange = onChange;
    this.#onProblem = onProblem;
    this.#otherTabs.onmessage = () => onChange();
  }

  async list() {
    return (await this.#use("readonly", summaries)) ?? [];
  }

  get(id) {
    return this.#use("readonly", (store) => done(store.get(id)));
  }

  /** Keep a chat. Messages that another tab has added to it are kept, too. */
  save(chat) {
    return this.#write(async (store) => {
      if (this.#removed.has(chat.id)) {
        return;
      }
      const stored = await done(store.get(chat.id));
      const known = new Set(chat.messages.map(({ id }) => id));
      chat.messages.push(...(stored?.messages ?? []).filter(({ id }) => !known.has(id)));
      chat.updated = Date.now();
      chat.bytes = new Blob([JSON.stringify(chat)]).size;
      const others = (await summaries(store)).filter(({ id }) => id !== chat.id);
      if (others.reduce((sum, { bytes }) => sum + bytes, chat.bytes) > MAX_BYTES) {
        throw new DOMException("", "QuotaExceededError");
      }
      await done(store.put(chat));
    });
  }

  remove(...ids) {
    ids.forEach((id) => this.#removed.add(id));
    return this.#write((store) => Promise.all(ids.map((id) => done(store.delete(id)))));
  }

  async #write(work) {
    await this.#use("readwrite", work);
    this.#otherTabs.postMessage(null);
    this.#onChange();
  }

  async #use(mode, work) {
    try {
      const result = await work((await this.#opened).transaction(NAME, mode).objectStore(NAME));
      if (mode === "readwrite") {
        this.#onProblem("");
      }
      return result;
    } catch (error) {
      const isFull = error.name === "QuotaExceededError";
      const full = `The ${MAX_BYTES / 2 ** 20} MiB for conversations in this browser are full.`;
      const reason = isFull
        ? `${full} Delete some, or export this one.`
        : `This browser keeps no conversations: ${error.message}`;
      this.#onProblem(`${reason} What is new is lost when the page is closed.`);
      return undefined;
    }
  }
}
