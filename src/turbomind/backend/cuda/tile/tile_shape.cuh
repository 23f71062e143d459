#pragma once

// ⑦ The shape of attention whose blocks share expanded tiles. It is for rows of so many values that
// one warp could not keep their sums in registers.
//
// All warps of a block read one tile of positions. It is copied to shared memory as it is stored,
// and expanded there to 16 bits once. The warps share the values' columns (tile_products.cuh).

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/core/dtype.h"

namespace turbomind::cuda {

inline constexpr int kTileWarps = 8;
inline constexpr int kTileThreads = 32 * kTileWarps;
inline constexpr int kRunTokens = 16;  // adjacent slots of one block
inline constexpr int kPartUnit = 32;   // a multiple of every tile's tokens

// T is the operands' type, and kDimCount the values of a row: at least the layer's, and zero past
// them. Rows are those of a block. Warps form kRowGroups groups, each of which has the rows of
// kRowTiles tiles of 16. The warps of a group share the value columns, and the dimensions of a
// score.
//
// A kernel's shape derives from this one. It adds the places of the queries' and the tile's rows in
// shared memory:
//   kStride      bytes of a row in 16 bits, with padding such that eight rows at the same column
//                are in different banks. The queries begin at 0.
//   kTileAt      the tile
//   kSumsAt      [kColumnWarps, kRows] parts of scores, rows kSumStride bytes apart. Weights
//                overwrite the first warp's part, each row its own.
//   kFactorsAt   [kRows] factors
template <DataType T, int kDimCount, int kRowCount, int kTokenCount>
struct SharedTileShape {
  static constexpr bool kBFloat = T == DataType::kBFloat16;
  static constexpr int kRows = kRowCount;
  static constexpr int kTokens = kTokenCount;
  static constexpr int kRowTiles = kRows == 16 ? 1 : 2;
  static constexpr int kRowGroups = kRows / (16 * kRowTiles);
  static constexpr int kColumnWarps = kTileWarps / kRowGroups;
  static constexpr int kColumns = kDimCount / kColumnWarps;  // of values, per warp
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kScoreSteps = kDimCount / 16 / kColumnWarps;  // of 16 dimensions, per warp
  static_assert(kDimCount % (16 * kColumnWarps) == 0);
  static_assert(kPartUnit % kTokens == 0 && kTokens % kRunTokens == 0);
  // Threads that share a row of scores, and the scores of each.
  static constexpr int kRowThreads = kTileThreads / kRows;
  static constexpr int kThreadScores = kTokens / kRowThreads;
  static constexpr int kExpandThreads = kTileThreads / kTokens;  // per token
  static constexpr int kSumStride = 4 * kTokens + 16;            // bytes of a row of scores in FP32
  static constexpr int kSumBytes = kColumnWarps * kRows * kSumStride;
};

// Return the blocks that run at the same time. Their registers allow `max_per_sm` on an SM.
inline int64_t TileSlots(const GpuProperties& gpu, size_t shared_bytes, int max_per_sm) {
  const auto fitting = static_cast<int64_t>(gpu.shared_bytes_per_block / shared_bytes);
  return std::clamp<int64_t>(fitting, 1, max_per_sm) * gpu.num_sms;
}

}  // namespace turbomind::cuda
