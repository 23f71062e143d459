const MIN_SECONDS = 0.1; // tokens that arrive at once give no rate

/** Measures an answer: time to the first token and tokens per second after it. */
export class Stopwatch {
  #start = performance.now();
  #first = 0;
  #last = 0;
  #tokens = 0;
  #firstTokens = 0;

  add(numTokens) {
    if (numTokens === 0) {
      return;
    }
    this.#last = performance.now();
    if (this.#first === 0) {
      this.#first = this.#last;
      this.#firstTokens = numTokens;
    }
    this.#tokens += numTokens;
  }

  stats() {
    if (this.#first === 0) {
      return null;
    }
    const seconds = (this.#last - this.#first) / 1000;
    const rate = seconds > MIN_SECONDS ? (this.#tokens - this.#firstTokens) / seconds : null;
    return { tokens: this.#tokens, rate, firstToken: (this.#first - this.#start) / 1000 };
  }
}
