#pragma once

// ⑥⑦ The part of a head's matrix state that a block owns: 32 columns of the state of one value head
// of a sequence. A lane owns a column, and a warp some adjacent rows, which stay in registers.
// Bytes: the state is read once and written once.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/recurrent/sequence_step.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"

namespace turbomind::cuda {

inline constexpr int kStateRows = 16;  // at most, of a warp
inline constexpr int kStateWarps = 8;  // of a block, for key_dim up to 128; twice as many above
static_assert(2 * kStateWarps * kStateRows == kMaxStateDim);

// Launch bounds: warps of kWarps, and as many blocks as share the registers of these rows.
template <int kWarps>
inline constexpr int kStateBlocks = 2 * kStateWarps / kWarps;

TM_DEVICE float Softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// Grid: sequences × value heads × ⌈value_dim / 32⌉.
template <int kWarps>
struct HeadState {
  TM_DEVICE explicit HeadState(const StateHeads& p)
      : lane(ThreadIndexX() & 31), warp(ThreadIndexX() / 32), value_dim(p.value_dim) {
    const int runs = (p.value_dim + 31) / 32;
    const int column = BlockIndexX() % runs * 32 + lane;
    head = BlockIndexX() / runs % p.value_heads;
    seq = BlockIndexX() / runs / p.value_heads;
    has_column = column < p.value_dim;
    num_rows = p.key_dim / kWarps;
    const int first_row = warp * num_rows;
    key = int64_t{p.KeyHead(head)} * p.key_dim + first_row;
    value = int64_t{head} * p.value_dim + (has_column ? column : 0);
    offset_ = (int64_t{head} * p.key_dim + first_row) * p.value_dim + (has_column ? column : 0);
  }

  // Set the rows to those of a slot, or to zeros.
  TM_DEVICE void Load(const float* slot, bool is_zero) {
#pragma unroll
    for (int j = 0; j < kStateRows; ++j) {
      rows[j] = !is_zero && has_column && j < num_rows
                    ? LoadGlobal(slot + offset_ + int64_t{j} * value_dim)
                    : 0.f;
    }
  }
  TM_DEVICE void Store(float* slot) const {
    float* to = slot + offset_;
#pragma unroll
    for (int j = 0; j < kStateRows; ++j) {
      if (has_column && j < num_rows) {
        StoreGlobal(to, rows[j]);
      }
      to += value_dim;
    }
  }

  int lane, warp;
  int value_dim;
  int head, seq;
  bool has_column;
  int num_rows;   // of the warp
  int64_t key;    // of the warp's first row in a row of q and k
  int64_t value;  // of the lane's column in a row of v and out
  float rows[kStateRows];

 private:
  int64_t offset_;
};

}  // namespace turbomind::cuda
