// ⑦ Experts beside a dense feed-forward: both have norms of their own, and the branch is their sum.

#include <cstdint>

#include "turbomind/model/decoder.h"

namespace turbomind {

// Adds the experts' output for `rows` rows from `first` on to `branch`, which has that of the dense
// feed-forward. The router reads the hidden values through a norm of its own.
void Decoder::AddExpertsBeside(int index, int first, int rows) {
  const MoeWeights& weights = weights_->layers[static_cast<size_t>(index)].moe;
  const int64_t offset = int64_t{first} * model().hidden_size;
  const float* const hidden = scratch_.hidden + offset;
  float* const branch = scratch_.branch + offset;
  float* const normed = scratch_.normed + offset;
  device_.Norm(NormOf(weights.dense_output_norm, branch, branch, rows));
  device_.Norm(NormOf(weights.router_norm, hidden, scratch_.router_input, rows));
  device_.Norm(NormOf(weights.norm, hidden, normed, rows));
  invokeMoe(device_, {.layer = &experts_[static_cast<size_t>(index)],
                      .x = normed,
                      .router_x = scratch_.router_input,
                      .out = scratch_.expert_branch,
                      .num_tokens = rows,
                      .accumulate = false,
                      .scratch = scratch_.moe});
  device_.Norm(NormOf(weights.output_norm, scratch_.expert_branch, scratch_.expert_branch, rows));
  device_.Add(
      {.x = scratch_.expert_branch, .out = branch, .count = int64_t{rows} * model().hidden_size});
}

}  // namespace turbomind
