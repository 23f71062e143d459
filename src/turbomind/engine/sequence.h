#pragma once

// ⑤ A request's state in the engine.

#include <cstdint>
#include <memory>
#include <vector>

#include "turbomind/engine/drafter.h"
#include "turbomind/engine/engine_config.h"
#include "turbomind/engine/request.h"

namespace turbomind {

// Only the engine thread may use it. The submitter shares `request` and may set its cancel flag.
//
// Invariants:
//  1. tokens = prompt, then generated tokens; it never shrinks. A preempted sequence computes all
//     of it again and treats generated tokens as part of the prompt.
//  2. num_computed < tokens.size() between steps, until the sequence is finished.
//  3. `draft` belongs to the current step and is computed after `tokens`. The rows of its tokens
//     decide how many of them are right; those enter `tokens` like sampled ones.
//  4. `output` collects the results of the current step; the engine empties it after each step.
struct Sequence {
  std::shared_ptr<Request> request;
  uint64_t arrival = 0;  // order of Submit
  std::vector<int32_t> tokens;
  int64_t num_prompt = 0;
  int64_t num_computed = 0;  // tokens whose K and V are in the cache
  int64_t num_planned = 0;   // new tokens in the current step, draft included
  std::vector<int32_t> draft;
  std::unique_ptr<Drafter> drafter;  // null: no speculation
  int64_t share_owed = 0;            // of the budget, unused so far, as the oldest prompt
  bool was_admitted = false;
  int cached_tokens = 0;        // at the first admission
  int64_t next_prompt_row = 0;  // first position whose prompt log-probabilities were not yet sent
  int64_t next_logits_row = 0;  // first position whose logits were not yet sent (kAll)
  int64_t next_pooled_row = 0;  // first position that is not in pooled_sum
  std::vector<double> pooled_sum;  // [hidden_size] of the final hidden states (kMean)
  int64_t num_tokens_sent = 0;     // generated tokens already passed to token_mask
  RequestOutput output;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_generated() const { return num_tokens() - num_prompt; }
  int64_t num_missing() const { return num_tokens() - num_computed; }
  bool finished() const { return output.finish_reason != FinishReason::kNone; }
  // Returns false if the output needs rows that cached tokens would not compute.
  bool may_use_prefix_cache() const {
    return request->num_prompt_logprobs < 0 && request->logits_output != LogitsOutput::kAll &&
           request->pooling != Pooling::kMean;
  }
};

// Returns the sequence of a request with all memory for the longest possible response, so that no
// step allocates.
std::unique_ptr<Sequence> MakeSequence(std::shared_ptr<Request> request,
                                       const EngineConfig& config);

}  // namespace turbomind
