#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/core/dtype.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/rope_config.h"

namespace turbomind {

// Experts that replace the feed-forward of some layers. Names match Hugging Face configs.
struct MoeConfig {
  int num_experts = 0;               // 0: a dense model
  int top_k = 0;                     // num_experts_per_tok
  int intermediate_size = 0;         // of one expert
  int shared_intermediate_size = 0;  // 0: no shared expert
  bool normalize = true;             // norm_topk_prob
  std::vector<uint8_t> layers;       // per layer; 1: experts, 0: dense feed-forward

  bool HasExperts(int layer) const {
    return num_experts > 0 && layers[static_cast<size_t>(layer)] != 0;
  }
};

// A decoder model as data. Optional parts (biases, q_norm and k_norm, sinks, separate head) are
// used if their weights exist.
struct ModelConfig {
  int num_layers = 0;
  int hidden_size = 0;
  int intermediate_size = 0;  // of the dense feed-forward; 0 if every layer has experts
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  int max_position = 0;  // max_position_embeddings
  float norm_eps = 1e-6f;
  float softmax_scale = 0.f;  // 0 means 1 / sqrt(head_dim)
  Activation activation = Activation::kSilu;
  float swiglu_limit = 7.f;  // for kClampedSwiglu
  MoeConfig moe;
  RopeConfig rope;
  std::vector<int> windows;              // per layer; 0: full attention
  DataType dtype = DataType::kBFloat16;  // cache dtype (16-bit values and inline metadata)

  // Throws InvalidArgument that names the field.
  void Validate() const;
  // Returns whether some layer has a feed-forward of intermediate_size.
  bool HasDenseLayer() const;
};

}  // namespace turbomind
