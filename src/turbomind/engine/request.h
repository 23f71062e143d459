#pragma once

// ④ What the user asked for, and what goes back. Requests enter the engine through one locked
// queue; outputs leave through another. Plain data plus an atomic cancel flag.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/ops/sampling_params.h"

namespace turbomind {

// kGeneration: the rows that new tokens were chosen from; kAll: of every token that was run, the
// prompt's included.
enum class LogitsOutput : uint8_t { kNone, kGeneration, kAll };

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

struct Request : SamplingRequest {
  uint64_t id = 0;  // unique; given by the caller
  std::vector<int32_t> prompt;
  int max_new_tokens = 0;  // 0: only run the prompt (log-probabilities, logits)
  bool ignore_eos = false;
  int num_prompt_logprobs = -1;  // as num_logprobs, for prompt tokens
  LogitsOutput logits_output = LogitsOutput::kNone;
  std::atomic<bool> cancelled = false;
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
