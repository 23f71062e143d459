#pragma once

// ⑥⑦ Arguments of the ops of latents (multi-head latent attention). As in params.h: plain data with
// the shape next to each pointer.
//
// A layer's cache has one row per token (KvLayerView::HasLatents): the latent, which is all of a
// value and the first part of a key, and the rotary part of the key. Queries are absorbed: they
// have the width of the latent, so that no key or value of a head exists.

#include <cstdint>

#include "turbomind/ops/params.h"

namespace turbomind {

// Applies RoPE to the rotary part of each query and each row, in place, and stores the rows. They
// are rounded to the cache dtype and quantized as K and V are. Whether `rows` then have rotated
// latents is the device's choice.
struct WriteLatentsParams {
  float* q = nullptr;     // [num_tokens, q_heads, nope_dim + rotary_dim]
  float* rows = nullptr;  // [num_tokens, rank + rotary_dim]: the normalized latent, the rotary part
  int q_heads = 0;
  int nope_dim = 0;
  const float* rope_cos = nullptr;  // [num_tokens, rotary_dim / 2]
  const float* rope_sin = nullptr;  // same
  bool interleaved = false;         // rotate pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  // Store latents after a normalized Hadamard rotation, in runs of RotationSize(rank).
  bool rotate = false;
  bool search_scales = false;  // as in WriteKvParams, with the following
  KvLayerView kv;
  KvLayerView window16 = {};
  BatchView batch;
  int64_t* num_nonfinite = nullptr;
  int64_t* num_clipped = nullptr;
};

// Computes y = x · wᵀ with a matrix of its own for each head. All matrices have one shape and one
// format. A row of y has the bits of Linear.
struct HeadLinearParams {
  const float* x = nullptr;   // [num_rows, num_heads, cols]
  int64_t x_stride = 0;       // floats between rows
  int64_t x_head_stride = 0;  // floats between heads
  float* y = nullptr;         // [num_rows, num_heads, outputs]
  int64_t y_stride = 0;
  int64_t y_head_stride = 0;
  const LinearPart* heads = nullptr;  // [num_heads]
  int num_heads = 0;
  int num_rows = 0;
};

// Attention of new tokens over the latents, their own included, read back as stored:
//   score = softmax_scale * (q · latent + q_rotary · rotary part)
//   out   = the sum of the latents, weighted by the softmax
// With `rotate`, both formulas are of the latents before their rotation: q is rotated too, and the
// sum back. Splits and tiles of positions are those of AttentionParams, and so are the views of a
// layer with a 16-bit window. Decoding sequences and prompts have one arithmetic. With `exact`, it
// is FP32. Without, latents in FP4 are multiplied in integers (backend/cpu/isa/attention).
struct LatentAttentionParams {
  const float* q = nullptr;         // [num_tokens, q_heads, rank], absorbed
  int64_t q_stride = 0;             // floats between tokens
  const float* q_rotary = nullptr;  // [num_tokens, q_heads, rotary_dim] after RoPE
  int64_t q_rotary_stride = 0;      // floats between tokens
  int64_t q_rotary_head_stride = 0;
  float* out = nullptr;  // [num_tokens, q_heads, rank], rows q_stride floats apart
  int q_heads = 0;
  float softmax_scale = 1.f;
  bool rotate = false;  // as in WriteLatentsParams
  bool exact = false;
  KvLayerView kv;
  KvLayerView window16 = {};
  PrecisionWindow rule = {};
  BatchView batch;
};

}  // namespace turbomind
