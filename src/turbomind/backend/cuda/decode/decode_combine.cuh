#pragma once

// ⑦ Merges the partial results of decode attention (decode_attention.cuh) into its output.
//
// A warp owns every warps_per_row-th partial of one row (a query head of a sequence). Each lane
// owns 16 bytes of the row, and four partials are in flight at once. The warps of a row are merged
// in shared memory. Bound: latency.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"

namespace turbomind::cuda {

// REQUIRES: partial_o and out are 16-byte aligned; head_dim is a multiple of 4.
struct CombineParams {
  const float* partial_o = nullptr;   // [num_partials, q_heads, head_dim]
  const float* partial_ml = nullptr;  // [num_partials, q_heads, 2]
  // [num_seqs + 1]; sequence i has the partials first_partial[i] to first_partial[i + 1]
  const int32_t* first_partial = nullptr;
  float* out = nullptr;  // [num_seqs, q_heads, head_dim]
  int num_rows = 0;      // num_seqs * q_heads
  int q_heads = 0;
  int head_dim = 0;
  int warps_per_row = 1;  // 1, 2, 4 or 8: the order of sums depends on it
  float softmax_scale = 1.f;
  const float* sinks = nullptr;       // [q_heads] or null
  const float* q_dot_mean = nullptr;  // [num_seqs, q_heads] or null: AttentionParams
};

inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineAhead = 4;

struct alignas(16) Floats4 {
  float v[4] = {};
};

// The merged partials of a warp: their largest m, and o and l relative to it.
template <int kVectors>
struct CombineState {
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
  TM_DEVICE void Add(const CombineState& other) {
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

// Merge the partials part, part + warps_per_row, ... of a row.
template <int kVectors>
TM_DEVICE CombineState<kVectors> AddPartials(const CombineParams& p, int row, int part, int lane) {
  const int sequence = row / p.q_heads;
  const int head = row % p.q_heads;
  const int end = LoadGlobal(p.first_partial + sequence + 1);
  CombineState<kVectors> sum;
#pragma unroll 1
  for (int i = LoadGlobal(p.first_partial + sequence) + part; i < end;
       i += kCombineAhead * p.warps_per_row) {
    CombineState<kVectors> next[kCombineAhead];
    float max = sum.m;
#pragma unroll
    for (int j = 0; j < kCombineAhead; ++j) {
      const int partial = i + j * p.warps_per_row;
      if (partial < end) {
        const int64_t at = static_cast<int64_t>(partial) * p.q_heads + head;
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
    for (int j = 0; j < kCombineAhead; ++j) {
      max = fmaxf(max, next[j].m);
    }
    sum.RaiseTo(max);
#pragma unroll
    for (int j = 0; j < kCombineAhead; ++j) {
      sum.Add(next[j]);
    }
  }
  return sum;
}

// Normalize and write a row. A sink adds weight but no value. A row without partials and without a
// sink is zero.
template <int kVectors>
TM_DEVICE void FinishRow(const CombineParams& p, int row, int lane, CombineState<kVectors> sum) {
  if (p.sinks != nullptr) {
    const float shift =
        p.q_dot_mean != nullptr ? p.softmax_scale * LoadGlobal(p.q_dot_mean + row) : 0.f;
    const float sink = (LoadGlobal(p.sinks + row % p.q_heads) - shift) * kLog2E;
    sum.RaiseTo(fmaxf(sum.m, sink));
    sum.l += Exp2Approx(sink - sum.m);
  }
  sum.Scale(sum.l > 0.f ? 1.f / sum.l : 0.f);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int dim = 4 * (lane + 32 * v);
    if (dim < p.head_dim) {
      float* to = p.out + static_cast<int64_t>(row) * p.head_dim + dim;
      StoreGlobal(reinterpret_cast<Floats4*>(to), sum.o[v]);
    }
  }
}

constexpr int CombineVectors(int head_dim) { return head_dim <= 128 ? 1 : 2; }
constexpr int CombineSharedBytes(int vectors) { return kCombineWarps * 32 * (16 * vectors + 8); }

// Grid: ⌈num_rows · warps_per_row / kCombineWarps⌉; kCombineWarps warps; CombineSharedBytes.
template <int kVectors>
__global__ void __launch_bounds__(32 * kCombineWarps) CombineKernel(CombineParams p) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int warp = ThreadIndexX() >> 5;
  const int part = warp % p.warps_per_row;
  const int row = (BlockIndexX() * kCombineWarps + warp) / p.warps_per_row;
  const bool is_row = row < p.num_rows;
  CombineState<kVectors> sum;
  if (is_row) {
    sum = AddPartials<kVectors>(p, row, part, lane);
  }
  if (p.warps_per_row > 1) {
    // Layout: each lane's words for each warp, with the words of one warp contiguous.
    char* const memory = SharedMemory();
    char* const ml = memory + kCombineWarps * 32 * 16 * kVectors;
    const auto at = [&](int of, int v) { return memory + ((of * kVectors + v) * 32 + lane) * 16; };
    const auto ml_at = [&](int of) { return ml + (of * 32 + lane) * 8; };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      StoreShared(at(warp, v), sum.o[v]);
    }
    StoreShared(ml_at(warp), Words<8>{{FloatBits(sum.m), FloatBits(sum.l)}});
    SyncBlock();
    for (int other = 1; part == 0 && other < p.warps_per_row; ++other) {
      CombineState<kVectors> next;
      const auto words = LoadShared<Words<8>>(ml_at(warp + other));
      next.m = BitsFloat(words.v[0]);
      next.l = BitsFloat(words.v[1]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        next.o[v] = LoadShared<Floats4>(at(warp + other, v));
      }
      sum.RaiseTo(fmaxf(sum.m, next.m));
      sum.Add(next);
    }
  }
  if (is_row && part == 0) {
    FinishRow<kVectors>(p, row, lane, sum);
  }
}

}  // namespace turbomind::cuda
