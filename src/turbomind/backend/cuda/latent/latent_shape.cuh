#pragma once

// ⑦ Parameters of attention over latents on a GPU, and its layout of shared memory.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_plan.h"
#include "turbomind/backend/cuda/tile/tile_shape.cuh"
#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Rows are (token, head) pairs of one sequence, in this order. A block has the rows of one
// sequence, and either all positions that they see, or a part of them with a partial result.
//
// REQUIRES: block_seq_len is a power of two, at least kRunTokens. rank and rotary_dim are multiples
// of 16, at most C::kRank and kLatentRotary. q, q_rotary and out are 16-byte aligned, and so are
// their strides.
struct LatentParams {
  const float* q = nullptr;         // [num_tokens, q_heads, rank]
  int64_t q_stride = 0;             // floats between tokens
  const float* q_rotary = nullptr;  // [num_tokens, q_heads, rotary_dim]
  int64_t q_rotary_stride = 0;
  int64_t q_rotary_head_stride = 0;
  float* out = nullptr;  // rows as in q
  int q_heads = 0;
  float softmax_scale = 1.f;
  KvLayerView views[2];                                 // the layer's pool and the 16-bit window
  const int32_t* block_tables[2] = {nullptr, nullptr};  // of the pools
  int64_t block_table_stride = 0;
  PrecisionWindow rule = {};
  const int32_t* cu_seqlens = nullptr;  // of the batch, as the following
  const int32_t* context_lens = nullptr;
  int first_seq = 0;  // the sequences of this launch
  int end_seq = 0;
  int first_token = 0;  // of the launch's first sequence
  int num_tiles = 0;    // blocks of rows of all sequences
  // Each sequence's positions, or those of an item, are cut into this many parts. Of sequence i and
  // part s, with `items` null, token t has the partial result (t - first_token) * num_parts + s.
  // Item i has the partial results i.partial * num_parts + s.
  int num_parts = 1;
  const DecodeItem* items = nullptr;  // of sequences with one token
  // For every partial result and head: o, not normalized, and (m, l) with m in units of log2. Null
  // if blocks write `out`.
  float* partial_o = nullptr;   // [num_partials, q_heads, rank]
  float* partial_ml = nullptr;  // [num_partials, q_heads, 2]
};
static_assert(sizeof(LatentParams) <= 4096);  // limit for kernel parameters

inline constexpr int kLatentRotary = 64;  // the largest rotary part
// The parts of a row in the cache: payload of V, payload of K, metadata of V, metadata of K.
inline constexpr int kRowParts = 4;

// Bytes of a part per token. Runs of kRunTokens tokens are contiguous in the pool and whole pieces
// of 16 bytes.
TM_HD int BytesOfPart(const KvLayerView& kv, int part) {
  const int s = part % 2 == 0 ? 1 : 0;
  return part < 2 ? kv.row_bytes[s]
                  : (kv.scale_bytes[s] > 0 ? kv.scale_bytes[s] : kv.param_bytes[s]);
}

// kRankCount is at least the layer's rank: the rest is zero.
template <DataType T, int kRankCount, int kRowCount, int kTokenCount>
struct LatentKernelConfig : SharedTileShape<T, kRankCount, kRowCount, kTokenCount> {
  using Shape = SharedTileShape<T, kRankCount, kRowCount, kTokenCount>;
  using Shape::kColumnWarps;
  using Shape::kRows;
  using Shape::kTokens;
  static constexpr int kRank = kRankCount;
  static constexpr int kRotarySteps = kLatentRotary / 16;  // of all warps of a group
  static_assert(kRotarySteps <= kColumnWarps);
  static constexpr int kStride = 2 * (kRank + kLatentRotary) + 16;
  static constexpr int kTileAt = kRows * kStride;
  static constexpr int kSumsAt = kTileAt + kTokens * kStride;
  static constexpr int kFactorsAt = kSumsAt + Shape::kSumBytes;
  // The offsets of the tile's runs of tokens. Latents in BF16 have none.
  static constexpr int kOffsetsAt = kFactorsAt + 4 * kRows;
  static constexpr int kOffsetBytes = 2 * kRank;
  static constexpr int kRuns = Shape::kBFloat ? 0 : kTokens / kRunTokens;
  static constexpr int kRawAt = kOffsetsAt + kRuns * kOffsetBytes;

  // Shared memory for views of these two pools.
  static int64_t SharedBytes(const KvLayerView (&views)[2]) {
    int64_t bytes = 0;
    for (const KvLayerView& view : views) {
      int64_t row = 0;
      for (int part = 0; part < kRowParts; ++part) {
        row += BytesOfPart(view, part);
      }
      bytes = row > bytes ? row : bytes;
    }
    return kRawAt + kTokens * bytes;
  }
};

}  // namespace turbomind::cuda
