#pragma once

// ④ The request and its output. Requests enter the engine through one locked queue; outputs leave
// through another. Both are plain data, plus an atomic cancel flag.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/kv/block_trie.h"
#include "turbomind/ops/sampling_params.h"

namespace turbomind {

// Positions whose logits are returned. kGeneration: the rows from which new tokens were sampled.
// kAll: every computed token, the prompt included.
enum class LogitsOutput : uint8_t { kNone, kGeneration, kAll };

// The vector that the final hidden states of a prompt become: the state of the last token, or the
// mean over all tokens.
enum class Pooling : uint8_t { kNone, kLast, kMean };

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kError };

struct Request : SamplingRequest {
  uint64_t id = 0;  // unique; set by the caller
  std::vector<int32_t> prompt;
  int priority = 0;  // lower values are served earlier (scheduler.h)
  // The last `num_resumed` tokens of `prompt` are the beginning of the response, which another
  // engine generated. Everything that follows is as if this engine had generated them, too:
  // sampling, penalties and min_new_tokens count them, max_new_tokens includes them, and token_mask
  // receives them.
  int num_resumed = 0;
  int max_new_tokens = 0;  // 0: only run the prompt (log-probabilities, logits, pooling)
  bool ignore_eos = false;
  int num_prompt_logprobs = -1;  // like num_logprobs, for prompt tokens
  LogitsOutput logits_output = LogitsOutput::kNone;
  Pooling pooling = Pooling::kNone;  // requires max_new_tokens 0 and no log-probabilities or logits
  // Use the long factors of longrope. Sequences longer than ShortRopeLength must; none of them
  // shares a prefix with one that does not, so their salts must differ.
  bool long_rope = false;
  CacheSalt cache_salt = {};  // requests share cached prefixes only if their salts are equal
  std::atomic<bool> cancelled = false;
};

// A chunk of a request's response. The last chunk has finish_reason != kNone; nothing follows it.
struct RequestOutput {
  uint64_t request_id = 0;
  std::vector<int32_t> tokens;          // new tokens, EOS and a matched stop sequence included
  std::vector<TokenLogprobs> logprobs;  // of `tokens`, if requested
  std::vector<TokenLogprobs> prompt_logprobs;  // of prompt[1..], in chunks, if requested
  std::vector<float> logits;                   // [logits_rows, vocab], if requested
  int64_t logits_rows = 0;
  std::vector<float> pooled;  // [hidden_size], with the last chunk, if requested
  FinishReason finish_reason = FinishReason::kNone;
  int stop_tokens = 0;            // trailing tokens: EOS or a matched stop sequence
  int cached_tokens = 0;          // prompt tokens taken from the prefix cache
  std::string error;              // set with kError
  bool is_request_fault = false;  // set with kError if the request's own options caused the error
  std::string error_field;  // the field that is wrong, if is_request_fault and it is one field
};

}  // namespace turbomind
