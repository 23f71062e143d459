#pragma once

// ⑦ The partial results of decode attention (decode_attention.h) → its output.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/decode_shape.h"

namespace turbomind::cuda {

// The partial results of one query head of one sequence → its output.
struct CombineParams {
  const float* partial_o = nullptr;   // [num_partials, q_heads, head_dim]
  const float* partial_ml = nullptr;  // [num_partials, q_heads, 2]
  // [num_seqs + 1] partials of a sequence: first_partial[i] to first_partial[i + 1]
  const int32_t* first_partial = nullptr;
  float* out = nullptr;  // [num_seqs, q_heads, head_dim]
  int q_heads = 0;
  int head_dim = 0;
  float softmax_scale = 1.f;
  const float* sinks = nullptr;       // [q_heads] or null
  const float* q_dot_mean = nullptr;  // [num_seqs, q_heads] or null: AttentionParams
};

// Grid: sequences × query heads; kThreads threads. A sink adds weight and no value.
template <int kThreads>
__global__ void CombineKernel(CombineParams p) {
  const int sequence = BlockIndexX();
  const int head = BlockIndexY();
  const int begin = LoadGlobal(p.first_partial + sequence);
  const int end = LoadGlobal(p.first_partial + sequence + 1);
  const int64_t row = static_cast<int64_t>(sequence) * p.q_heads + head;
  float sink = -INFINITY;
  if (p.sinks != nullptr) {
    const float shift =
        p.q_dot_mean != nullptr ? p.softmax_scale * LoadGlobal(p.q_dot_mean + row) : 0.f;
    sink = (LoadGlobal(p.sinks + head) - shift) * kLog2E;
  }
  const auto ml = [&](int i) {
    return p.partial_ml + 2 * (static_cast<int64_t>(i) * p.q_heads + head);
  };
  float m = fmaxf(kLeastMax, sink);
  for (int i = begin; i < end; ++i) {
    m = fmaxf(m, LoadGlobal(ml(i)));
  }
  float l = Exp2Approx(sink - m);
  for (int i = begin; i < end; ++i) {
    l += Exp2Approx(LoadGlobal(ml(i)) - m) * LoadGlobal(ml(i) + 1);
  }
  for (int d = ThreadIndexX(); d < p.head_dim; d += kThreads) {
    float o = 0.f;
    for (int i = begin; i < end; ++i) {
      const int64_t at = (static_cast<int64_t>(i) * p.q_heads + head) * p.head_dim + d;
      o += Exp2Approx(LoadGlobal(ml(i)) - m) * LoadGlobal(p.partial_o + at);
    }
    StoreGlobal(p.out + row * p.head_dim + d, o / l);
  }
}

}  // namespace turbomind::cuda
