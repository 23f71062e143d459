#pragma once

// ④ What the user asked for, and what goes back. Requests enter the engine through one locked
// queue; outputs leave through another. Plain data plus an atomic cancel flag.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace turbomind {

// Names, meaning and defaults as in lmdeploy.GenerationConfig.
struct SamplingParams {
  bool do_sample = false;  // false: greedy
  float temperature = 1.f;
  int top_k = 0;  // 0: all
  float top_p = 1.f;
  float min_p = 0.f;
  float repetition_penalty = 1.f;
  float presence_penalty = 0.f;
  float frequency_penalty = 0.f;
  uint64_t seed = 0;
  int num_logprobs = -1;  // -1: none; 0: of the chosen token; n: and of the n most likely
  std::vector<std::pair<int32_t, float>> logit_bias;
};

// kGeneration: the rows that new tokens were chosen from; kAll: of every token that was run, the
// prompt's included.
enum class LogitsOutput : uint8_t { kNone, kGeneration, kAll };

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

// Writes allowed tokens for the next position as a bitmask, [ceil(vocab / 32)] words, bit i % 32 of
// word i / 32. `new_tokens` are the tokens chosen since the last call. Returns false when
// generation must stop here. A thrown exception ends the request with kError; InvalidArgument says
// that the request asked for what cannot be. Called by a thread that runs beside the step, for one
// request at a time.
using TokenMaskFn =
    std::function<bool(const std::vector<int32_t>& new_tokens, std::vector<uint32_t>& mask)>;

struct Request {
  uint64_t id = 0;  // unique; given by the caller
  std::vector<int32_t> prompt;
  int max_new_tokens = 0;  // 0: only run the prompt (log-probabilities, logits)
  int min_new_tokens = 0;
  bool ignore_eos = false;
  std::vector<int32_t> eos_ids;
  std::vector<std::vector<int32_t>> stop_sequences;  // token sequences of any length
  std::vector<std::vector<int32_t>> bad_sequences;   // the last token of a match is never chosen
  SamplingParams sampling;
  int num_prompt_logprobs = -1;  // as num_logprobs, for prompt tokens
  LogitsOutput logits_output = LogitsOutput::kNone;
  TokenMaskFn token_mask;
  std::atomic<bool> cancelled = false;
};

struct TokenLogprobs {
  float chosen = 0.f;
  std::vector<std::pair<int32_t, float>> top;  // by decreasing probability
};

// A piece of a request's answer. The last one has finish_reason != kNone; nothing follows it.
struct RequestOutput {
  uint64_t request_id = 0;
  std::vector<int32_t> tokens;          // new tokens, a matched stop sequence's or EOS included
  std::vector<TokenLogprobs> logprobs;  // of `tokens`, when asked for
  std::vector<TokenLogprobs> prompt_logprobs;  // of prompt[1..], in pieces, when asked for
  std::vector<float> logits;                   // [logits_rows, vocab] when asked for
  int64_t logits_rows = 0;
  FinishReason finish_reason = FinishReason::kNone;
  int stop_tokens = 0;            // how many trailing tokens are EOS or a matched stop sequence
  int cached_tokens = 0;          // prompt tokens taken from the prefix cache
  std::string error;              // with kError
  bool is_request_fault = false;  // with kError: its own options, not the engine or the model
};

}  // namespace turbomind
