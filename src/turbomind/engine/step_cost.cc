#include "turbomind/engine/step_cost.h"

#include <algorithm>

#include "turbomind/kv/sliding_window.h"

namespace turbomind {
namespace {

// A chunk reads the K and V of its prompt once, which takes as long as the attention of 2.5 tokens.
constexpr int64_t kTwiceReadTokens = 5;
// The attention of SmolLM2 takes 1.32 times as long per product as the linear layers (AVX-512,
// NVFP4, Q4_1).
constexpr int64_t kTokenNumerator = 3;
constexpr int64_t kTokenDenominator = 4;

}  // namespace

int64_t StepCost::Chunk(const std::vector<LayerGroup>& groups, int64_t begin, int64_t end) const {
  const int64_t middle = (begin + end) / 2 + 1;
  int64_t attended = 0;
  for (const LayerGroup& group : groups) {
    const int64_t reach = WindowReach(group.window);
    const int64_t visible = reach > 0 ? std::min(middle, reach) : middle;
    attended += int64_t{group.num_readers} * visible;
  }
  const int64_t num_tokens = end - begin;
  return num_tokens * token + (2 * num_tokens + kTwiceReadTokens) * attended / 2;
}

int64_t StepCost::TokensFor(const std::vector<LayerGroup>& groups, int64_t begin,
                            int64_t max_tokens, int64_t budget) const {
  int64_t fits = 0;
  int64_t too_many = max_tokens + 1;
  while (too_many - fits > 1) {
    const int64_t middle = (fits + too_many) / 2;
    (Chunk(groups, begin, begin + middle) <= budget ? fits : too_many) = middle;
  }
  return fits;
}

StepCost EstimateStepCost(const ModelConfig& model, const DeviceCapability& device) {
  const int64_t hidden = model.hidden_size;
  const LatentConfig& latent = model.latent;
  const int64_t rank = model.head_dim;
  const int64_t heads = int64_t{model.num_heads} * rank;
  int64_t products = 0;  // of one token
  for (int layer = 0; layer < model.num_layers; ++layer) {
    if (latent.exists()) {
      products += latent.q_rank > 0 ? latent.q_rank * (hidden + model.QuerySize())
                                    : hidden * model.QuerySize();
      products += hidden * (rank + latent.rope_dim + model.AttendedSize()) +
                  heads * (latent.nope_dim + latent.value_dim);
    } else if (model.HasAttention(layer)) {
      const int64_t gate = model.attention_gate ? model.QSize(layer) : 0;
      products += hidden * (model.QkvSize(layer) + model.QSize(layer) + gate);
    }
    if (model.recurrent.Has(layer)) {
      products += hidden * (model.recurrent.InputSize() + model.recurrent.ValueSize());
    }
    const int64_t matrices = model.gated ? 3 : 2;
    if (model.moe.HasExperts(layer)) {
      const MoeConfig& moe = model.moe;
      const int64_t outer = moe.latent_size > 0 ? moe.latent_size : hidden;
      products += outer * matrices * moe.top_k * moe.intermediate_size +
                  hidden * (matrices * moe.shared_intermediate_size + 2 * moe.latent_size);
    } else if (model.HasFeedForward(layer)) {
      products += hidden * matrices * model.IntermediateSize(layer);
    }
    products += hidden * 3 * model.per_layer.size;  // gate, up and the layer's projection
  }
  const int64_t per_position = 2 * heads;
  StepCost cost;
  cost.token = std::max<int64_t>(products * kTokenNumerator / kTokenDenominator / per_position, 1);
  cost.step = cost.token * device.step_cost_tokens;
  cost.logits = hidden * model.vocab_size * kTokenNumerator / kTokenDenominator / per_position;
  return cost;
}

}  // namespace turbomind
