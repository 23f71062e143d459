// Watches whether the server answers, and asks again until it does.

const UP_MS = 5000;
const DOWN_MS = 2000;
const TIMEOUT_MS = 5000;

/** Return why the server cannot answer questions, or an empty string. */
async function findProblem() {
  let response;
  try {
    response = await fetch("health", { signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    return "The server does not answer. The page tries again until it does.";
  }
  const json = await response.json().catch(() => null);
  if (!response.ok) {
    return json?.error?.message ?? `The server is not ready (HTTP ${response.status}).`;
  }
  return json?.status === "sleeping" ? "The engine sleeps. It answers again when it is woken up." : "";
}

export class Connection {
  problem = "";
  #onChange;
  #timer = 0;

  /** `onChange()` follows each change of `problem`. */
  constructor({ onChange }) {
    this.#onChange = onChange;
    document.addEventListener("visibilitychange", () => this.check());
    this.#timer = setTimeout(() => this.check(), UP_MS);
  }

  /** Ask now, and again and again while the page is visible. */
  async check() {
    clearTimeout(this.#timer);
    if (document.hidden) {
      return;
    }
    const problem = await findProblem();
    if (problem !== this.problem) {
      this.problem = problem;
      this.#onChange();
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.check(), problem ? DOWN_MS : UP_MS);
  }
}
