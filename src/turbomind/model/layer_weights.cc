// The linear layers and bytes of weights. weights.cc fills them.

#include "turbomind/model/weights.h"

namespace turbomind {

int64_t LinearWeight::rows() const {
  int64_t total = 0;
  for (const auto& part : parts) {
    total += part->rows;
  }
  return total;
}

int64_t LinearWeight::cols() const { return parts.empty() ? 0 : parts.front()->cols; }

std::vector<const LinearWeight*> LayerWeights::shared_linears() const {
  return {&qkv,
          &attention_gate,
          &output,
          &latent.q_down,
          &latent.q,
          &latent.down,
          &latent.k_matrices,
          &latent.v_matrices,
          &recurrent.input,
          &recurrent.output,
          &gate_up,
          &down,
          &moe.router,
          &moe.latent_down,
          &moe.latent_up,
          &moe.shared_gate_up,
          &moe.shared_down,
          &moe.shared_router,
          &per_layer_gate,
          &per_layer_up};
}

std::vector<const LinearWeight*> LayerWeights::linears() const {
  std::vector<const LinearWeight*> all = shared_linears();
  for (const ExpertWeights& expert : moe.experts) {
    all.push_back(&expert.gate_up);
    all.push_back(&expert.down);
  }
  return all;
}

int64_t Weights::num_bytes() const {
  int64_t total = static_cast<int64_t>(vectors.num_bytes()) + embedding->num_bytes();
  total += head ? head->num_bytes() : 0;
  total += per_layer_embedding ? per_layer_embedding->num_bytes() : 0;
  for (const auto& part : per_layer_projection.parts) {
    total += part->num_bytes();
  }
  for (const LayerWeights& layer : layers) {
    for (const LinearWeight* linear : layer.linears()) {
      for (const auto& part : linear->parts) {
        total += part->num_bytes();
      }
    }
  }
  return total;
}

}  // namespace turbomind
