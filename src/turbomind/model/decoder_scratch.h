#pragma once

#include <cstddef>
#include <cstdint>

#include "turbomind/model/model_config.h"
#include "turbomind/ops/moe.h"

namespace turbomind {

// What a step may ask of the decoder.
struct StepLimits {
  int max_tokens = 0;         // new tokens of a step
  int max_logit_rows = 0;     // rows of logits at a time
  int ffn_rows = 0;           // rows of a feed-forward at a time; the cut changes no result
  bool removes_mean = false;  // K loses its mean in some layer
};

// The decoder's buffers, as arithmetic: the memory plan counts what the decoder reserves.
struct DecoderScratch {
  // What the host reads after a step, side by side:
  int64_t* num_nonfinite = nullptr;  // [1] counts all steps
  int64_t* num_clipped = nullptr;    // [num_layers] counts all steps
  int32_t* chosen = nullptr;         // [max_logit_rows] tokens that the device chose
  // Of a step:
  float* hidden = nullptr;    // [max_tokens, hidden]
  float* normed = nullptr;    // [max_tokens, hidden]
  float* cos = nullptr;       // [max_tokens, rope_dim / 2]
  float* sin = nullptr;       // [max_tokens, rope_dim / 2]
  float* selected = nullptr;  // [max_logit_rows, hidden]
  float* logits = nullptr;    // [max_logit_rows, vocab]
  // Of a layer's attention:
  float* qkv = nullptr;         // [max_tokens, (heads + 2 kv_heads) * head_dim]
  float* attended = nullptr;    // [max_tokens, heads * head_dim]
  float* q_dot_mean = nullptr;  // [max_tokens, heads]; where K loses its mean
  // Of its feed-forward, in the same memory:
  float* gate_up = nullptr;    // [ffn rows, 2 * intermediate]; where a layer is dense
  float* activated = nullptr;  // [ffn rows, intermediate]
  MoeScratch moe;              // for ffn rows; where a layer has experts

  // Lays the buffers out from `memory` on, each at a multiple of 64 bytes, and returns the bytes
  // they take. With null it only counts.
  int64_t Place(const ModelConfig& model, const StepLimits& limits, std::byte* memory);
};

}  // namespace turbomind
