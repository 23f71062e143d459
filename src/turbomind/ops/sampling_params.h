#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "turbomind/core/members.h"

namespace turbomind {

// Names, meaning and defaults match lmdeploy.GenerationConfig.
struct SamplingParams {
  bool do_sample = false;  // false: greedy
  float temperature = 1.f;
  int top_k = 0;  // 0: no limit
  float top_p = 1.f;
  float min_p = 0.f;
  float repetition_penalty = 1.f;
  float presence_penalty = 0.f;
  float frequency_penalty = 0.f;
  uint64_t seed = 0;
  int num_logprobs = -1;  // -1: none; 0: the sampled token; n: also the n most likely tokens
  std::vector<std::pair<int32_t, float>> logit_bias;

  // All of them. Python sees them under their names.
  using Members = MemberList<&SamplingParams::do_sample, &SamplingParams::temperature,
                             &SamplingParams::top_k, &SamplingParams::top_p, &SamplingParams::min_p,
                             &SamplingParams::repetition_penalty, &SamplingParams::presence_penalty,
                             &SamplingParams::frequency_penalty, &SamplingParams::seed,
                             &SamplingParams::num_logprobs, &SamplingParams::logit_bias>;
};

// Writes the tokens allowed at the next position as a bitmask of [ceil(vocab / 32)] words: token i
// is bit i % 32 of word i / 32. `new_tokens` are the tokens generated since the last call. Returns
// false if generation must stop here. An exception ends the request with kError; InvalidArgument
// means that the request itself was invalid. A separate thread makes the calls while the step runs,
// for one request at a time.
using TokenMaskFn =
    std::function<bool(const std::vector<int32_t>& new_tokens, std::vector<uint32_t>& mask)>;

// The part of a request that determines its tokens.
struct SamplingRequest {
  int min_new_tokens = 0;
  std::vector<int32_t> eos_ids;
  std::vector<std::vector<int32_t>> stop_sequences;  // token sequences of any length
  std::vector<std::vector<int32_t>> bad_sequences;   // the last token of a match is never sampled
  SamplingParams sampling;
  TokenMaskFn token_mask;
};

struct TokenLogprobs {
  float chosen = 0.f;
  std::vector<std::pair<int32_t, float>> top;  // by decreasing probability
};

}  // namespace turbomind
