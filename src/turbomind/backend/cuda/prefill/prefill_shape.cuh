#pragma once

// ⑦ Parameters of prefill attention on a GPU, and its layout of shared memory.

#include <cstdint>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/core/dtype.h"
#include "turbomind/kv/precision_window.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind::cuda {

// The number of ranges of positions that a query sees. They are those of SeenSpans (kv_ops.h), in
// order: `quantized` (all positions if there is no 16-bit window), `sinks` and `recent`.
inline constexpr int kPrefillRanges = 3;

struct SeenPositions {
  int begin = 0;
  int end = 0;  // at most begin: empty
};

// Neither bound decreases as `position` grows.
TM_HD SeenPositions SeenBy(const PrecisionWindow& rule, int window, int range, int position) {
  const int first = FirstVisible(window, position);
  const int next = position + 1;
  if (!rule.enabled()) {
    return {first, range == 0 ? next : 0};
  }
  const int sinks = rule.SinkEnd();
  const int recent = rule.RecentBegin(position);
  if (range == 0) {
    return {first > sinks ? first : sinks, recent};
  }
  return range == 1 ? SeenPositions{first, sinks < next ? sinks : next}
                    : SeenPositions{first > recent ? first : recent, next};
}

// One view of the cache as dense 16-bit rows.
struct DenseView {
  const uint16_t* k = nullptr;  // [num_heads, num_rows, head_dim]
  const uint16_t* v = nullptr;
  int64_t num_rows = 0;
};

// The positions [begin, end), each seen by some query of the sequence, are the rows from `row` on.
struct DenseRange {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t row = 0;
};

struct PrefillSequence {
  int32_t first_tile = 0;  // in the grid
  int32_t first_token = 0;
  int32_t num_tokens = 0;
  int32_t position = 0;  // of the first token
  // Split s reads the positions [split_begin + s * split_len, split_begin + (s + 1) * split_len).
  // Both numbers are multiples of kPrefillSplitUnit.
  int32_t split_begin = 0;
  int32_t split_len = 0;
  DenseRange ranges[kPrefillRanges];
};

inline constexpr int kPrefillSplitUnit = 64;  // a multiple of every tile's positions
inline constexpr int kMaxPrefillSplits = 32;
inline constexpr int kMaxPrefillSequences = 64;  // kernel parameters are limited to 4 KiB

// REQUIRES: q, q_stride and out are multiples of 16 bytes.
struct PrefillParams {
  const float* q = nullptr;  // row i at q + i * q_stride: [q_heads, head_dim]
  int64_t q_stride = 0;
  float* out = nullptr;               // [num_tokens, q_heads, head_dim]
  const float* sinks = nullptr;       // [q_heads] or null
  const float* q_dot_mean = nullptr;  // [num_tokens, q_heads] or null
  // [KV heads of the layer] scales of keys and values in the quantized pool; null means 1.
  const float* key_scale = nullptr;
  const float* value_scale = nullptr;
  DenseView views[2];  // of the layer's pool and of the 16-bit window
  int q_heads = 0;
  int group = 1;       // query heads per KV head
  int first_head = 0;  // the layer's KV head that comes first in the views
  int num_heads = 0;   // in the views
  float softmax_scale = 1.f;
  float score_cap = 0.f;  // 0: none
  int window = 0;
  PrecisionWindow rule = {};
  // With more than one split, for each of them: o, not normalized, and (m, l) with m in units of
  // log2. A row is a token of the launch and a query head of the views.
  float* partial_o = nullptr;   // [num_splits, num_rows, head_dim]
  float* partial_ml = nullptr;  // [num_splits, num_rows, 2]
  int64_t num_rows = 0;
  int num_splits = 1;
  int num_tiles = 0;
  int num_sequences = 0;
  PrefillSequence sequences[kMaxPrefillSequences];
};
static_assert(sizeof(PrefillParams) <= 4096);

inline constexpr int kPrefillWarps = 4;
inline constexpr int kPrefillThreads = 32 * kPrefillWarps;
inline constexpr int kPrefillBlocks = 2;  // blocks per SM

// T is the operands' type. Each warp has kRowTileCount tiles of 16 queries.
template <DataType T, int D, int kRowTileCount>
struct PrefillConfig {
  static_assert(D % 16 == 0);
  static constexpr bool kBFloat = T == DataType::kBFloat16;
  static constexpr int kHeadDim = D;
  static constexpr int kSteps = D / 16;
  static constexpr int kChunks = D / 8;  // 16-byte chunks per row
  static constexpr int kRowTiles = kRowTileCount;
  static constexpr int kRows = kPrefillWarps * 16 * kRowTiles;
  static constexpr int kKeys = D > 128 ? 32 : 64;  // positions per tile
  // Shared memory holds the queries, then two stages of keys and values. Rows are padded so that
  // eight rows at the same column are in different banks.
  static constexpr int kStride = 2 * D + 16;
  static constexpr int kQueryBytes = kRows * kStride;
  static constexpr int kSideBytes = kKeys * kStride;
  static constexpr int kStageBytes = 2 * kSideBytes;
  static constexpr int kSharedBytes = kQueryBytes + 2 * kStageBytes;
  static constexpr bool kCanSplit = kRowTileCount == 1;  // larger tiles fill the GPU without splits
  static constexpr bool kQueryInRegisters = kRowTiles * kSteps <= 8;
};

}  // namespace turbomind::cuda
