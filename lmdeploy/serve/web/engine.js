// The live view of the engine: the blocks of the KV cache, the prefix cache and the requests.

import { getJson } from "./api.js";
import { byId, formatBytes, make, makeSvg, whole } from "./dom.js";

const COLUMNS = 32;
const MAX_CELLS = 256;
const BUSY_MS = 500;
const IDLE_MS = 2000;

export class EngineView {
  #conversation;
  #timer = 0;
  #last = null; // tokens and time of the poll before
  #stats = null;

  constructor(conversation) {
    this.#conversation = conversation;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** Read the state now, and again and again while the page is visible. */
  async poll() {
    clearTimeout(this.#timer);
    if (document.hidden) {
      return;
    }
    let isRefused = false;
    try {
      this.#stats = await getJson("v1/engine/stats");
      this.show();
      byId("engine-error").hidden = true;
    } catch (error) {
      byId("engine-error").textContent = error.message;
      byId("engine-error").hidden = false;
      isRefused = error.status === 401 || error.status === 404; // no key, or disabled
    }
    byId("engine-view").hidden = this.#stats === null;
    clearTimeout(this.#timer);
    if (isRefused) {
      return;
    }
    const isBusy = this.#conversation.isGenerating || this.#stats?.requests.running > 0;
    this.#timer = setTimeout(() => this.poll(), isBusy ? BUSY_MS : IDLE_MS);
  }

  show() {
    if (this.#stats === null) {
      return;
    }
    const { kv_cache: cache, prefix_cache: prefix } = this.#stats;
    byId("kv-format").textContent = cache.format;
    byId("kv-format").title = cache.quality;
    showBytes(byId("bytes"), cache);
    const { window16, format } = cache;
    const name = format === "none" ? "16-bit blocks" : "Quantized blocks";
    byId("pool-main").classList.toggle("in16", format === "none");
    showPool(byId("pool-main"), { name, blocks: cache.blocks });
    byId("pool-window16").hidden = window16 === null;
    if (window16) {
      showPool(byId("pool-window16"), { name: `${windowName(window16)} window`, blocks: window16.blocks });
    }
    showConversation(byId("conversation-blocks"), cache, this.#conversation.tokens);
    showPrefix(byId("prefix"), prefix, cache.states);
    this.#showRequests();
  }

  #showRequests() {
    const { requests, tokens } = this.#stats;
    const now = performance.now();
    const seconds = this.#last ? (now - this.#last.time) / 1000 : 0;
    const rate = seconds > 0 ? (tokens.generated - this.#last.generated) / seconds : 0;
    if (!this.#last || seconds >= 0.4) {
      this.#last = { time: now, generated: tokens.generated };
      byId("requests").lastElementChild.lastElementChild.textContent = rate.toFixed(1);
    }
    const [running, waiting] = byId("requests").querySelectorAll("dd");
    running.textContent = whole(requests.running);
    waiting.textContent = whole(requests.waiting);
  }
}

function setBar(bar, value, { max, text }) {
  bar.querySelector("i").style.width = `${(value / Math.max(max, value, 1e-9)) * 100}%`;
  bar.querySelector("b").textContent = text;
}

function showBytes(figure, cache) {
  const { bytes_per_token: own, bytes_per_token_none: none } = cache;
  const [first, second] = figure.querySelectorAll(".bar");
  first.querySelector("span").textContent = cache.format;
  setBar(first, own, { max: none, text: whole(own) });
  setBar(second, none, { max: none, text: whole(none) });
  second.hidden = cache.format === "none";
  const session = `A session of ${whole(cache.session_len)} tokens takes ${formatBytes(cache.session_bytes)}`;
  const ratio = cache.session_bytes_none / cache.session_bytes;
  const compared = `, ${ratio.toFixed(2)}× less than in 16 bit (${formatBytes(cache.session_bytes_none)})`;
  figure.querySelector(".note").textContent = `${session}${cache.format === "none" ? "" : compared}.`;
}

/** Show a pool as a map: active blocks first, then cached ones, then free ones. */
function showPool(figure, { name, blocks }) {
  const each = Math.max(Math.ceil(blocks.total / MAX_CELLS), 1);
  const cells = Math.ceil(blocks.total / each);
  const active = Math.ceil(blocks.active / each);
  const cached = Math.ceil(blocks.cached / each);
  const kinds = Array.from({ length: cells }, (_, i) => {
    return i < active ? "active" : i < active + cached ? "cached" : "free";
  });
  const label = ["active", "cached", "free"].map((kind) => `${whole(blocks[kind])} ${kind}`);
  const legend = make("ul", { class: "legend" });
  for (const kind of ["active", "cached", "free"]) {
    legend.append(make("li", { class: kind }, make("b", {}, whole(blocks[kind])), ` ${kind}`));
  }
  const note = each > 1 ? `${whole(each)} blocks per square` : "one square per block";
  figure.replaceChildren(
    make("figcaption", {}, name, make("small", {}, note)),
    blockMap(kinds, `${name}: ${label.join(", ")}`),
    legend,
  );
}

/** Return the name of the window's format: "16-bit" or "int8". */
function windowName(window16) {
  return !window16 || window16.format === "16bit" ? "16-bit" : window16.format;
}

/** Show which blocks of the conversation are in the window (docs/kv_cache.md, "The window"). */
function showConversation(figure, cache, tokens) {
  figure.hidden = tokens === 0;
  const { block_tokens: length, window16 } = cache;
  const count = Math.ceil(tokens / length);
  const sinks = window16 ? Math.ceil(window16.sink_tokens / length) : 0;
  const recent = window16 ? Math.ceil(window16.recent_tokens / length) : -1;
  const isInWindow = (block) => {
    return cache.format === "none" || (window16 && (block < sinks || block + recent >= count - 1));
  };
  const kinds = Array.from({ length: count }, (_, i) => (isInWindow(i) ? "window16" : "active"));
  const numWindow = kinds.filter((kind) => kind === "window16").length;
  const name = windowName(window16).replace("16-bit", "16 bit");
  const text = `${numWindow} in ${name}, ${count - numWindow} in ${cache.format}`;
  const legend = make("ul", { class: "legend" });
  legend.append(make("li", { class: "window16" }, make("b", {}, whole(numWindow)), ` in ${name}`));
  if (cache.format !== "none") {
    const quantized = make("b", {}, whole(count - numWindow));
    legend.append(make("li", { class: "active" }, quantized, ` in ${cache.format}`));
  }
  figure.replaceChildren(
    make("figcaption", {}, "This conversation", make("small", {}, `${whole(tokens)} tokens`)),
    blockMap(kinds.slice(0, MAX_CELLS), `Blocks of this conversation: ${text}`),
    legend,
  );
}

function blockMap(kinds, label) {
  const rows = Math.max(Math.ceil(kinds.length / COLUMNS), 1);
  const map = makeSvg("svg", { viewBox: `0 0 ${COLUMNS * 10} ${rows * 10}`, role: "img", "aria-label": label });
  kinds.forEach((kind, i) => {
    const [x, y] = [(i % COLUMNS) * 10 + 0.75, Math.floor(i / COLUMNS) * 10 + 0.75];
    map.append(makeSvg("rect", { class: kind, x, y, width: 8.5, height: 8.5, rx: 1.5 }));
  });
  return map;
}

function showPrefix(figure, { queried_tokens: queried, hit_tokens: hits, cut_tokens: cut }, states) {
  const share = hits / Math.max(queried, 1);
  setBar(figure.querySelector(".bar"), share, { max: 1, text: `${(share * 100).toFixed(0)} %` });
  const copy = states ? "no checkpoint" : "lost their copy in the window";
  const lost = cut ? ` ${whole(cut)} found tokens had ${copy}.` : "";
  const text = `${whole(hits)} of ${whole(queried)} prompt tokens came from the cache.${lost}`;
  figure.querySelector(".note").textContent = text + (states ? ` ${checkpointText(states)}` : "");
}

/** Describe the states of recurrent layers (docs/kv_cache.md, "Recurrent layers"). */
function checkpointText(states) {
  const { checkpoints_kept: kept, checkpoints_total: total } = states;
  const bytes = formatBytes(states.bytes_per_sequence);
  return `${whole(kept)} of ${whole(total)} checkpoints of the recurrent layers, ${bytes} each.`;
}
