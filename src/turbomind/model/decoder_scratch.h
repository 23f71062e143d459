#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/model/model_config.h"
#include "turbomind/ops/moe.h"

namespace turbomind {

// The limits of a step.
struct StepLimits {
  int max_tokens = 0;         // new tokens of a step
  int max_logit_rows = 0;     // rows of logits at a time
  int ffn_rows = 0;           // rows of a feed-forward at a time; does not change results
  bool removes_mean = false;  // a layer subtracts K's mean
};

// The angles of a step's tokens for one RoPE.
struct RopeAngles {
  float* cos = nullptr;  // [max_tokens, rope_dim / 2]
  float* sin = nullptr;  // same
};

// The buffers of attention over latents. `absorbed` and `sums` are of the heads of one pass: of all
// heads unless the step has many tokens.
struct LatentScratch {
  float* q_latents = nullptr;  // [max_tokens, q_rank]; for models that have them
  float* q = nullptr;          // [max_tokens, heads, nope_dim + rope_dim]
  float* rows = nullptr;       // [max_tokens, rank + rope_dim]
  float* absorbed = nullptr;   // [absorbed_rows, rank] by token and head of the pass
  float* sums = nullptr;       // same
  int64_t absorbed_rows = 0;

  // Returns how many heads a pass over `num_tokens` tokens has.
  int HeadsOfPass(int num_heads, int num_tokens) const;
};

// The decoder's buffers as an arithmetic layout, so that the memory plan counts exactly what the
// decoder reserves.
struct DecoderScratch {
  // Contiguous values that the host reads after a step:
  int64_t* num_nonfinite = nullptr;  // [1] sum over all steps
  int64_t* num_clipped = nullptr;    // [num_layers] sums over all steps
  int32_t* chosen = nullptr;         // [max_logit_rows] tokens that the device sampled
  // Buffers of a step:
  float* hidden = nullptr;              // [max_tokens, hidden]
  float* normed = nullptr;              // [max_tokens, hidden]
  float* branch = nullptr;              // [max_tokens, hidden]; for models that change branches
  std::vector<RopeAngles> ropes;        // as ModelConfig::ropes
  std::vector<RopeAngles> block_ropes;  // of the middle of each token's block; for a bias of K
  float* per_layer = nullptr;           // [max_tokens, layers, PerLayerInputs::size]
  float* selected = nullptr;            // [max_logit_rows, hidden]
  float* logits = nullptr;              // [max_logit_rows, vocab]
  float* per_layer_rows = nullptr;      // [ffn rows, layers, PerLayerInputs::size]; before layer 0
  // Buffers of a layer's attention, for its widest layer:
  float* qkv = nullptr;             // [max_tokens, (heads + 2 kv_heads) * head_dim]
  float* attended = nullptr;        // [max_tokens, ModelConfig::AttendedSize]
  float* attention_gate = nullptr;  // same; for models that have it
  float* q_dot_mean = nullptr;      // [max_tokens, heads]; for layers that subtract K's mean
  // With latents, instead of qkv:
  LatentScratch latent;
  // Buffers of a recurrent layer, in the same memory unless a layer has both:
  float* projected = nullptr;  // [max_tokens, RecurrentConfig::InputSize]
  float* convolved = nullptr;  // [max_tokens, channels]
  float* mixed = nullptr;      // [max_tokens, value_size]
  // Buffers of its feed-forward, in the same memory:
  float* gate_up = nullptr;        // [ffn rows, 2 * intermediate]; for dense layers
  float* activated = nullptr;      // [ffn rows, intermediate]
  MoeScratch moe;                  // for ffn rows; for layers with experts
  float* router_input = nullptr;   // [ffn rows, hidden]; for experts beside a dense feed-forward
  float* expert_branch = nullptr;  // same
  // Buffer of its per-layer inputs, in the same memory:
  float* per_layer_gate = nullptr;  // [ffn rows, PerLayerInputs::size]

  // Places the buffers from `memory` on, each at a multiple of 64 bytes, and returns their size in
  // bytes. With null it only computes the size.
  int64_t Place(const ModelConfig& model, const StepLimits& limits, std::byte* memory);
};

}  // namespace turbomind
