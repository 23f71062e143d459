#pragma once

// ⑦ Merges the partial results of decode attention into its output: a warp takes a row.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"

namespace turbomind::cuda {

inline constexpr float kMinRowMax = -1e30f;
inline constexpr float kLog2E = 1.44269504f;

// The partial results of a step and their place in the output.
// REQUIRES: partial_o and out are 16-byte aligned; head_dim is a multiple of 4.
struct MergeParams {
  // For every partial result and query head: o, not normalized, and (m, l) with m in units of log2.
  float* partial_o = nullptr;   // [num_partials, q_heads, head_dim]
  float* partial_ml = nullptr;  // [num_partials, q_heads, 2]
  // [num_seqs + 1]; sequence i has the partials first_partial[i] to first_partial[i + 1]. If it is
  // null, sequence i has the partials i * num_parts to (i + 1) * num_parts.
  const int32_t* first_partial = nullptr;
  int num_parts = 1;
  float* out = nullptr;  // [num_seqs, q_heads, head_dim]
  int q_heads = 0;
  int head_dim = 0;
  float softmax_scale = 1.f;
  const float* sinks = nullptr;       // [q_heads] or null
  const float* q_dot_mean = nullptr;  // [num_seqs, q_heads] or null: AttentionParams
};

struct alignas(16) Floats4 {
  float v[4] = {};
};

// Merged partials of a row: their largest m, and o and l relative to it.
template <int kVectors>
struct MergedRow {
  float m = kMinRowMax;
  float l = 0.f;
  Floats4 o[kVectors];

  TM_DEVICE void Scale(float factor) {
    l *= factor;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o[v].v[i] *= factor;
      }
    }
  }
  TM_DEVICE void RaiseTo(float max) {
    Scale(Exp2Approx(m - max));
    m = max;
  }
  TM_DEVICE void Add(const MergedRow& other) {
    const float factor = Exp2Approx(other.m - m);
    l += factor * other.l;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o[v].v[i] += factor * other.o[v].v[i];
      }
    }
  }
};

// A row: a query head of a sequence.
struct MergeRow {
  int sequence = 0;
  int head = 0;
};

// Return the first partial of a sequence.
TM_DEVICE int FirstPartial(const MergeParams& p, int sequence) {
  return p.first_partial != nullptr ? LoadGlobal(p.first_partial + sequence)
                                    : sequence * p.num_parts;
}

// Return a row's sink logit, in units of log2. A sink adds weight but no value.
TM_DEVICE float SinkLogit(const MergeParams& p, const MergeRow& row) {
  if (p.sinks == nullptr) {
    return -INFINITY;
  }
  const int64_t index = static_cast<int64_t>(row.sequence) * p.q_heads + row.head;
  const float shift =
      p.q_dot_mean != nullptr ? p.softmax_scale * LoadGlobal(p.q_dot_mean + index) : 0.f;
  return (LoadGlobal(p.sinks + row.head) - shift) * kLog2E;
}

// Which partials of a row a warp merges: first, first + step, ...
struct PartialStride {
  int first = 0;
  int step = 1;
};

// Merge partials of a row, with kAhead of them in flight. Each lane owns 16 bytes of the row, or
// twice as many.
template <int kVectors, int kAhead>
TM_DEVICE MergedRow<kVectors> AddPartials(const MergeParams& p, MergeRow row, PartialStride stride,
                                          int lane) {
  const int end = FirstPartial(p, row.sequence + 1);
  MergedRow<kVectors> sum;
#pragma unroll 1
  for (int i = FirstPartial(p, row.sequence) + stride.first; i < end; i += kAhead * stride.step) {
    MergedRow<kVectors> next[kAhead];
    float max = sum.m;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int partial = i + j * stride.step;
      if (partial < end) {
        const int64_t at = static_cast<int64_t>(partial) * p.q_heads + row.head;
        next[j].m = LoadGlobal(p.partial_ml + 2 * at);
        next[j].l = LoadGlobal(p.partial_ml + 2 * at + 1);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int dim = 4 * (lane + 32 * v);
          if (dim < p.head_dim) {
            const float* from = p.partial_o + at * p.head_dim + dim;
            next[j].o[v] = LoadGlobal(reinterpret_cast<const Floats4*>(from));
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      max = fmaxf(max, next[j].m);
    }
    sum.RaiseTo(max);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      sum.Add(next[j]);
    }
  }
  return sum;
}

// Normalize and write a row. A row without partials and without a sink is zero.
template <int kVectors>
TM_DEVICE void FinishRow(const MergeParams& p, MergeRow row, int lane, MergedRow<kVectors> sum) {
  const int64_t index = static_cast<int64_t>(row.sequence) * p.q_heads + row.head;
  if (p.sinks != nullptr) {
    const float sink = SinkLogit(p, row);
    sum.RaiseTo(fmaxf(sum.m, sink));
    sum.l += Exp2Approx(sink - sum.m);
  }
  sum.Scale(sum.l > 0.f ? 1.f / sum.l : 0.f);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int dim = 4 * (lane + 32 * v);
    if (dim < p.head_dim) {
      float* to = p.out + index * p.head_dim + dim;
      StoreGlobal(reinterpret_cast<Floats4*>(to), sum.o[v]);
    }
  }
}

TM_HD constexpr int MergeVectors(int head_dim) {
  return head_dim <= 128 ? 1 : head_dim <= 256 ? 2 : 4;
}

}  // namespace turbomind::cuda
