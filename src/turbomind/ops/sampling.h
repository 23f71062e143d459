#pragma once

// ⑧ Samples one token from one row of logits. Host code. Rows are independent, so a token never
// depends on its batch.

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
  const uint32_t* token_mask = nullptr;      // [ceil(vocab_size / 32)] allowed tokens; null: all
};

struct SampleResult {
  int32_t token = -1;
  TokenLogprobs logprobs;  // set if num_logprobs >= 0
};

// Samples tokens. Steps in order: logit_bias; repetition penalty (prompt and generated, as in
// transformers); presence and frequency penalty (generated); bad sequences; EOS and stop sequences
// while num_generated < min_new_tokens; token mask. The last step is argmax (greedy, ties to the
// lowest id), or temperature, top-k, top-p, min-p and random sampling (ops/sampling_math.h). Random
// sampling depends only on seed and num_generated.
//
// Log-probabilities are computed from the model's unmodified row. Owns scratch memory: one thread
// at a time.
class Sampler {
 public:
  explicit Sampler(int vocab_size);

  // Throws InvalidArgument for wrong options of the request, and std::runtime_error if the model
  // computed no numbers. The next row may be sampled after an error.
  SampleResult Sample(const SampleInput& input);

 private:
  struct Candidate {
    int32_t id;
    float weight;  // exp of the scaled logit; the highest is 1
  };

  void ApplyPenalties(const SampleInput& input);
  void ApplyMasks(const SampleInput& input) const;
  void FillWeights(const float* logits, float max_logit, float inverse);
  double SumBlocks(float min_p);
  int32_t SampleRow(const float* logits, float max_logit, const RowSampling& sampling);
  int32_t SampleFromAll(float min_p, double uniform);
  double SelectLargest(const RowSampling& sampling);

  int vocab_size_;
  std::vector<float> raw_;             // [vocab_size] logits before any change
  std::vector<float> weights_;         // [vocab_size] since the first random sampling
  std::vector<int32_t> counts_;        // [vocab_size] since the first penalty, zero between calls
  std::vector<Candidate> candidates_;  // of one sampling
  std::vector<double> block_sums_;     // [ceil(vocab_size / kSumBlock)] of one sampling
};

// Returns whether Sample would take the argmax of the unmodified row and nothing else needs the
// row. The token is then that of ArgMaxRowsParams, or Sample must report the error in the row.
bool IsPlainArgMax(const SamplingRequest& request, int64_t num_generated);
// Returns the parameters with which a device samples the same token as Sample from the unmodified
// row. Returns nothing if the row is also needed for something else or would be modified. The
// caller sets the row index.
std::optional<RowSampling> RowSamplingOf(const SamplingRequest& request, int64_t num_generated);

// Computes the log-softmax of a row at `token`, and its `num_top` most likely tokens (ties to the
// lowest id). A row with NaN gives NaN. REQUIRES: token in [0, vocab_size).
TokenLogprobs ComputeLogprobs(const float* logits, int vocab_size, int32_t token, int num_top);

}  // namespace turbomind
