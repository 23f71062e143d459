#pragma once

// ⑦ Parameters of attention with large heads on a GPU, and its layout of shared memory.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_merge.cuh"
#include "turbomind/backend/cuda/decode/decode_plan.h"
#include "turbomind/backend/cuda/tile/tile_shape.cuh"
#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"
#include "turbomind/ops/fast_bias.h"

namespace turbomind::cuda {

// Rows are (token, query head of a KV head) pairs of one sequence, in this order. A block has rows
// of one sequence and KV head, and either all positions that they see, or a part of them with a
// partial result.
//
// REQUIRES: block_seq_len is a power of two, at least kRunTokens. head_dim is a multiple of 16, at
// most kMaxHeadDim. q, out and q_stride are multiples of 16 bytes.
struct LargeHeadParams {
  const float* q = nullptr;  // row i at q + i * q_stride: [q_heads, head_dim]
  int64_t q_stride = 0;
  float score_cap = 0.f;  // 0: none
  int window = 0;
  PrecisionWindow rule = {};
  FastBias fast_bias = {};
  KvLayerView views[2];                                 // the layer's pool and the 16-bit window
  const int32_t* block_tables[2] = {nullptr, nullptr};  // of the pools
  int64_t block_table_stride = 0;
  // The following are not used with items.
  const int32_t* cu_seqlens = nullptr;  // of the batch
  const int32_t* context_lens = nullptr;
  int first_seq = 0;  // the sequences of this launch
  int end_seq = 0;
  int first_token = 0;  // of the launch's first sequence
  int num_tiles = 0;    // blocks of rows of all sequences, for each KV head
  // Each sequence's positions are cut into this many parts. Of part s, token t
  // has the partial result (t - first_token) * num_parts + s.
  int num_parts = 1;
  const DecodeItem* items = nullptr;  // of sequences with one token, in one of the views
  int item_view = 0;
  // As in DecodeParams, but for blocks of rows: [num_seqs, KV heads, blocks].
  int32_t* arrivals = nullptr;
  bool writes_partials = false;  // blocks write partial results, not merge.out
  MergeParams merge;             // out and q_dot_mean are those of the whole batch
};
static_assert(sizeof(LargeHeadParams) <= 4096);  // limit for kernel parameters

// The bytes of a token's metadata in a tile: the scales of both sides as they are interleaved in
// the scale pool, then (scale, zero) of K and of V.
TM_HD int MetaBytes(const KvLayerView& kv) {
  return kv.ScaleStride() + kv.param_bytes[0] + kv.param_bytes[1];
}

// T is the operands' type. Both sides of a tile take the same place in 16 bits, K first. As they
// are stored, they have their own places. The metadata of the next tile arrives with its keys,
// while the values of this one are still to be expanded, so that it has two places.
template <DataType T, int kRowCount, int kTokenCount>
struct LargeHeadConfig : SharedTileShape<T, kMaxHeadDim, kRowCount, kTokenCount> {
  using Shape = SharedTileShape<T, kMaxHeadDim, kRowCount, kTokenCount>;
  using Shape::kRows;
  using Shape::kTokens;
  static constexpr int kStride = 2 * kMaxHeadDim + 16;
  static constexpr int kTileAt = kRows * kStride;
  // Rows that multiply the queries as keys do: the codes of the K offset of each run of kRunTokens
  // tokens, then ones. Their sums are in the padding of the scores' rows.
  static constexpr int kRuns = kTokens / kRunTokens;
  static constexpr int kOffsetRows = Shape::kBFloat ? 0 : kRuns + 1;  // 16-bit keys have none
  static constexpr int kOffsetsAt = kTileAt + kTokens * kStride;
  static constexpr int kSumsAt = kOffsetsAt + kOffsetRows * kStride;
  static_assert(4 * (kTokens + kRuns + 1) <= Shape::kSumStride);
  static constexpr int kFactorsAt = kSumsAt + Shape::kSumBytes;
  static constexpr int kRawAt = kFactorsAt + 4 * kRows;

  // Shared memory for a view.
  static int64_t SharedBytes(const KvLayerView& kv) {
    return kRawAt + int64_t{kTokens} * (kv.row_bytes[0] + kv.row_bytes[1] + 2 * MetaBytes(kv));
  }
};

}  // namespace turbomind::cuda
