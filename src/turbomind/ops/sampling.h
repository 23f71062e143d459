#pragma once

// ⑧ From one row of logits to one token. Host code; each row stands alone, so a token never
// depends on the batch it was computed in.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "turbomind/ops/params.h"
#include "turbomind/ops/sampling_params.h"

namespace turbomind {

// One sequence that needs its next token.
struct SampleInput {
  float* logits = nullptr;                   // [vocab_size], overwritten
  const SamplingRequest* request = nullptr;  // sampling, bad and stop sequences, min_new_tokens
  const int32_t* tokens = nullptr;           // [num_tokens] prompt, then generated
  int64_t num_tokens = 0;                    // prompt included
  int64_t num_generated = 0;                 // the last num_generated of tokens
  const uint32_t* token_mask = nullptr;      // [ceil(vocab_size / 32)] allowed tokens, or null: all
};

// `error` is empty on success; else token is -1 and the request must end with kError.
struct SampleResult {
  int32_t token = -1;
  TokenLogprobs logprobs;  // when num_logprobs >= 0
  std::string error;
  bool is_request_fault = false;  // with an error: the request's options, not the model's logits
};

// Chooses tokens. Order: logit_bias; repetition penalty (prompt and generated, as transformers);
// presence and frequency penalty (generated); bad sequences; EOS and stop sequences while
// num_generated < min_new_tokens; token mask; then the highest logit (greedy, ties to the lowest
// id), or temperature, top-k, top-p, min-p and a sample (ops/sampling_math.h) that depends on seed
// and num_generated alone. Log-probabilities are of the row as it came from the model, before all
// of that. Owns scratch: one thread at a time.
class Sampler {
 public:
  explicit Sampler(int vocab_size);

  SampleResult Sample(const SampleInput& input);

 private:
  struct Candidate {
    int32_t id;
    float weight;  // exp of the scaled logit, highest = 1
  };

  std::string ApplyPenalties(const SampleInput& input);
  void ApplyMasks(const SampleInput& input) const;
  void FillWeights(const float* logits, float max_logit, float inverse);
  double SumBlocks(float min_p);
  int32_t SampleRow(const float* logits, float max_logit, const RowSampling& sampling);
  int32_t SampleFromAll(float min_p, double uniform);
  double SelectLargest(const RowSampling& sampling);

  int vocab_size_;
  std::vector<float> raw_;             // [vocab_size] before anything was changed
  std::vector<float> weights_;         // [vocab_size] since the first sample
  std::vector<int32_t> counts_;        // [vocab_size] since the first penalty, zero between calls
  std::vector<Candidate> candidates_;  // of one sample
  std::vector<double> block_sums_;     // [ceil(vocab_size / kSumBlock)] of one sample
};

// Whether Sample would choose the highest of the row as it came from the model, and nothing else is
// asked of the row: the token is then that of ArgMaxRowsParams, or Sample has to tell what is wrong
// with the row.
bool IsPlainArgMax(const SamplingRequest& request, int64_t num_generated);
// What a device needs to know to sample the token that Sample would from the row as it came from
// the model, where nothing else is asked of the row; else nothing. The row's index is the caller's.
std::optional<RowSampling> RowSamplingOf(const SamplingRequest& request, int64_t num_generated);

// Log-softmax of a row at `token`, and its `num_top` most likely tokens (ties to the lowest id).
// A row with NaN gives NaN. REQUIRES: token in [0, vocab_size).
TokenLogprobs ComputeLogprobs(const float* logits, int vocab_size, int32_t token, int num_top);

}  // namespace turbomind
