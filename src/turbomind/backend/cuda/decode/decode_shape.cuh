#pragma once

// ⑦ Parameters of decode attention on a GPU, and its layout of shared memory: the constants for one
// pair of formats, head_dim and tile.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_merge.cuh"
#include "turbomind/backend/cuda/decode/decode_plan.h"
#include "turbomind/backend/cuda/kv/fragments.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/kv/layout.h"
#include "turbomind/ops/fast_bias.h"

namespace turbomind::cuda {

// REQUIRES: block_bytes and scale_block_bytes are below 2^31. block_seq_len is a power of two, at
// least the tile's positions and at most kMaxBlockTokens. The modes, dtype and head_dim are those
// of the kernel.
struct DecodeParams {
  const float* q = nullptr;  // row i at q + i * q_stride: [q_heads, head_dim]
  int64_t q_stride = 0;
  float score_cap = 0.f;                  // 0: none
  KvLayerView kv;                         // pointers into the device's pools
  const int32_t* block_tables = nullptr;  // [num_seqs, block_table_stride]
  int64_t block_table_stride = 0;
  const DecodeItem* items = nullptr;  // [gridDim.y]
  MergeParams merge;
  // [num_seqs, tiles of query heads] zeros, which the kernels of the step leave: how many items of
  // a row are complete. The block that completes a row merges it. Null: CombineKernel merges.
  int32_t* arrivals = nullptr;
  FastBias fast_bias = {};
  const float* amplitudes = nullptr;  // AmplitudeParams; null without a fast bias
};

inline constexpr int kDecodeWarps = 4;  // per block, unless its ring is too large
inline constexpr int kHeadTile = 8;     // query heads per matrix product
inline constexpr int kMaxBlockTokens = 128;
inline constexpr int kShiftRows = 8;  // tiles of a warp whose K offsets are read together
inline constexpr float kLazyMax = 8.f;
inline constexpr int kMergeAhead = 4;  // partials of a row in flight if a block merges it

// Return the tiles of query heads of a KV head.
TM_HD constexpr int HeadTiles(int group) { return (group + kHeadTile - 1) / kHeadTile; }

// Return cap * tanh(score * scale / cap) in units of log2. `scale` contains log2(e), and `cap` is
// in units of e.
TM_DEVICE float CapScore(float score, float scale, float cap) {
  const float t = Exp2Approx(-2.f * fabsf(score * (scale * InverseApprox(cap))));
  return copysignf(cap * kLog2E * (1.f - t) * InverseApprox(1.f + t), score);
}

// Shared memory per block with which four blocks fit an SM of 228 KiB. The system takes 1 KiB per
// block.
inline constexpr int kQuarterOfSm = 56 << 10;
// Shared memory per block that every GPU from SM 80 on supports. SM 86, 89 and 120 support no more.
// Two such blocks fit an SM of 228 KiB.
inline constexpr int kMaxShared = 99 << 10;

// Return the words per access for a run of words that is aligned to its length.
constexpr int WordsAtOnce(int words) { return words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1; }

// The layout of one side's rows of a tile in shared memory, and the assignment of words to lanes.
template <KvCacheMode M, DataType T, int D>
struct SideShape {
  using F = Fragments<M, T>;
  static constexpr int kRowBytes = D * F::kBits / 8;
  static constexpr int kScaleBytes = IsFp4(M) ? D / 16 : 0;
  static constexpr int kParamBytes = IsInteger(M) ? 4 : 0;
  static constexpr int kRowWords = kRowBytes / 4;
  // Keys: lane t of four owns every fourth piece of kKeyPiece words. The last piece may be past the
  // end of a row.
  static constexpr int kKeyWords = (kRowWords + 3) / 4;
  static constexpr int kKeyPiece = kRowWords % 4 == 0 ? WordsAtOnce(kKeyWords) : 1;
  static constexpr bool kKeysEven = kRowWords % (4 * kKeyPiece) == 0;
  static TM_HD constexpr int KeyWord(int t, int i) {
    return i / kKeyPiece * 4 * kKeyPiece + t * kKeyPiece + i % kKeyPiece;
  }
  // Values: lane g of eight owns every eighth piece of kValuePiece words, or two dimensions of
  // every 16.
  static constexpr bool kEighths = kRowWords % 8 == 0;
  static constexpr int kValueWords = kEighths ? kRowWords / 8 : D / 16;
  static constexpr int kValuePiece = kEighths ? WordsAtOnce(kValueWords) : 1;
  static constexpr int kValueDims = kEighths ? F::kDims : 2;  // dimensions per word
  // Return the first dimension of the lane's word i.
  static TM_HD constexpr int ValueWordDim(int g, int i) {
    return kEighths
               ? (i / kValuePiece * 8 * kValuePiece + g * kValuePiece + i % kValuePiece) * F::kDims
               : 16 * i + 2 * g;
  }
  // Return the dimension of the lane's row g in a tile of results. Row g + 8 has the next
  // dimension.
  static TM_HD constexpr int ValueDim(int g, int tile) {
    return ValueWordDim(g, 2 * tile / kValueDims) + 2 * tile % kValueDims;
  }
  // Rows of values are scattered so that the pieces that a warp reads at once (of the rows 2 t) are
  // in different banks. Of every eight rows, the even ones come before the odd ones. In row t of
  // every four, byte b is stored at b ^ Swizzle(t).
  static constexpr bool kScattered = kEighths && (kRowBytes & (kRowBytes - 1)) == 0;
  static TM_HD constexpr int Slot(int row) {
    return kScattered ? (row & ~7) + (row & 1) * 4 + (row >> 1 & 3) : row;
  }
  static TM_HD constexpr int Swizzle(int slot) {
    return !kScattered || kRowBytes < 64 ? 0 : kRowBytes == 64 ? (slot & 2) << 4 : (slot & 3) << 5;
  }
};

template <KvCacheMode K, KvCacheMode V, DataType T, int D, int kTokens, int kStageCount,
          int kWarpCount = kDecodeWarps, int kHeadTileCount = 1>
struct DecodeConfig {
  using KeyShape = SideShape<K, T, D>;
  using ValueShape = SideShape<V, T, D>;
  static constexpr KvCacheMode kKeyFormat = K;
  static constexpr KvCacheMode kValueFormat = V;
  static constexpr DataType kType = T;
  static constexpr int kHeadDim = D;
  static constexpr int kTileTokens = kTokens;
  static constexpr int kStages = kStageCount;
  static constexpr int kWarps = kWarpCount;
  static constexpr int kHeadTiles = kHeadTileCount;
  static constexpr int kHeads = kHeadTile * kHeadTiles;  // per block, at most
  static constexpr int kSubTiles = kTokens / 16;
  // Tokens that the warps of a block read in one turn. If these are whole blocks of the pool, a
  // warp's tiles have the same slot in all of them.
  static constexpr int kTurnTokens = kWarps * kTokens;
  static constexpr bool kWholeBlocks = kTurnTokens >= kMaxBlockTokens;
  static constexpr int kScaleStride = KeyShape::kScaleBytes + ValueShape::kScaleBytes;
  // A stage holds keys, values, scales, key parameters and value parameters. Each part begins at a
  // multiple of 16 bytes.
  static constexpr int kValuesAt = kTokens * KeyShape::kRowBytes;
  static constexpr int kScalesAt = kValuesAt + kTokens * ValueShape::kRowBytes;
  static constexpr int kKeyParamsAt = kScalesAt + kTokens * kScaleStride;
  static constexpr int kValueParamsAt = kKeyParamsAt + kTokens * KeyShape::kParamBytes;
  static constexpr int kStageBytes = kValueParamsAt + kTokens * ValueShape::kParamBytes;
  static constexpr int kRingBytes = kStageBytes * kStageCount;
  // Keys in 16 bits have no offsets.
  static constexpr bool kHasShifts = K != KvCacheMode::kNone;
  static constexpr int kShiftValues = IsInteger(K) ? 2 : 4;  // of a lane and a head tile
  static constexpr int kShiftTileBytes = 4 * 4 * kShiftValues;
  static constexpr int kShiftRowBytes = kHeadTiles * kShiftTileBytes;
  static constexpr int kShiftBytes = kHasShifts ? kShiftRows * kShiftRowBytes : 0;
  static constexpr int kReadBytes = kWarps * (kRingBytes + kShiftBytes);
  static constexpr int kMergeStride = D + 4;  // floats per head when warps are merged
  static constexpr int kMergeBytes = kWarps * kHeads * (kMergeStride + 2) * 4;
  static constexpr int kSharedBytes = kReadBytes > kMergeBytes ? kReadBytes : kMergeBytes;
  // Blocks per SM for which the registers must suffice.
  static constexpr int kBlocksPerSm =
      D <= 128 && kSharedBytes <= kQuarterOfSm && kHeadTiles == 1 ? 4 : 2;
  static constexpr int kSteps = (KeyShape::kKeyWords * Fragments<K, T>::kDims / 2 + 1) / 2;
  static constexpr int kOutTiles = D / 16;
};

// A lane's indices, constant for the whole kernel.
struct Lane {
  int lane;
  int warp;
  int g;  // 0..7: its row of the operands, its head in a head tile's results
  int t;  // 0..3: its columns
};

// One warp's view of its item.
template <class C>
struct DecodeTask {
  const DecodeParams& params;
  DecodeItem item;
  int kv_head;
  int first_head;  // query head of the layer
  int num_heads;
  char* ring;    // the warp's ring in shared memory
  char* shifts;  // the warp's shifts of kShiftRows tiles
  Lane at;
};

}  // namespace turbomind::cuda
