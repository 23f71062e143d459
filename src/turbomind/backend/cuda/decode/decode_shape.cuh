#pragma once

// ⑦ What decode attention on a GPU is given, and how its shared memory is laid out: the constants
// of one pair of formats, head_dim and tile.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_plan.h"
#include "turbomind/backend/cuda/kv/fragments.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {

// REQUIRES: block_bytes and scale_block_bytes below 2^31; block_seq_len a power of two, at least
// the tile's positions and at most kMaxBlockTokens; modes, dtype and head_dim those of the kernel.
struct DecodeParams {
  const float* q = nullptr;  // row i at q + i * q_stride: [q_heads, head_dim]
  int64_t q_stride = 0;
  int q_heads = 0;
  float softmax_scale = 1.f;
  KvLayerView kv;                         // pointers into the device's pools
  const int32_t* block_tables = nullptr;  // [num_seqs, block_table_stride]
  int64_t block_table_stride = 0;
  const DecodeItem* items = nullptr;  // [gridDim.y]
  // Of every partial result and query head: o, not normalized, and (m, l) with m in units of log2.
  float* partial_o = nullptr;   // [num_partials, q_heads, head_dim]
  float* partial_ml = nullptr;  // [num_partials, q_heads, 2]
};

inline constexpr int kDecodeWarps = 4;  // of a block, unless its ring is too large
inline constexpr int kHeadTile = 8;     // query heads of one matrix product
inline constexpr int kMaxBlockTokens = 128;
inline constexpr float kMinRowMax = -1e30f;
inline constexpr float kLazyMax = 8.f;
inline constexpr float kLog2E = 1.44269504f;

// Shared memory with which four blocks fit an SM of 228 KiB, 1 KiB of each taken by the system.
inline constexpr int kQuarterOfSm = 56 << 10;
// What every GPU from SM 80 on gives a block; SM 86, 89 and 120 give no more. Two such blocks fit
// an SM of 228 KiB.
inline constexpr int kMaxShared = 99 << 10;

// Of a run of words that begins at a multiple of its length.
constexpr int WordsAtOnce(int words) { return words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1; }

// One side's rows of a tile in shared memory, and who reads what.
template <KvCacheMode M, DataType T, int D>
struct SideShape {
  using F = Fragments<M, T>;
  static constexpr int kRowBytes = D * F::kBits / 8;
  static constexpr int kScaleBytes = IsFp4(M) ? D / 16 : 0;
  static constexpr int kParamBytes = IsInteger(M) ? 4 : 0;
  static constexpr int kRowWords = kRowBytes / 4;
  // Keys: lane t of four owns every fourth piece of kKeyPiece words; the last may lie behind a row.
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
  static constexpr int kValueDims = kEighths ? F::kDims : 2;  // of a word
  // First dimension of the lane's word i.
  static TM_HD constexpr int ValueWordDim(int g, int i) {
    return kEighths
               ? (i / kValuePiece * 8 * kValuePiece + g * kValuePiece + i % kValuePiece) * F::kDims
               : 16 * i + 2 * g;
  }
  // Of a tile of results: the lane's row g; row g + 8 is the next.
  static TM_HD constexpr int ValueDim(int g, int tile) {
    return ValueWordDim(g, 2 * tile / kValueDims) + 2 * tile % kValueDims;
  }
  // Where rows of values lie, so that what a warp reads at once (pieces of the rows 2 t) is in
  // different banks: the even rows of eight before the odd ones, and of row t of four the bytes b
  // at b ^ Swizzle(t).
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
  static constexpr int kHeads = kHeadTile * kHeadTiles;  // of a block, at most
  static constexpr int kSubTiles = kTokens / 16;
  // The warps' turn of tiles is whole blocks: a warp's tiles lie at one slot of all its blocks.
  static constexpr int kTurnTokens = kWarps * kTokens;
  static constexpr bool kWholeBlocks = kTurnTokens >= kMaxBlockTokens;
  static constexpr int kScaleStride = KeyShape::kScaleBytes + ValueShape::kScaleBytes;
  // A stage: keys, values, scales, parameters of keys, of values; each begins at 16 bytes.
  static constexpr int kValuesAt = kTokens * KeyShape::kRowBytes;
  static constexpr int kScalesAt = kValuesAt + kTokens * ValueShape::kRowBytes;
  static constexpr int kKeyParamsAt = kScalesAt + kTokens * kScaleStride;
  static constexpr int kValueParamsAt = kKeyParamsAt + kTokens * KeyShape::kParamBytes;
  static constexpr int kStageBytes = kValueParamsAt + kTokens * ValueShape::kParamBytes;
  static constexpr int kRingBytes = kStageBytes * kStageCount;
  static constexpr int kMergeStride = D + 4;  // floats of a head when warps are merged
  static constexpr int kMergeBytes = kWarps * kHeads * (kMergeStride + 2) * 4;
  static constexpr int kSharedBytes =
      kWarps * kRingBytes > kMergeBytes ? kWarps* kRingBytes : kMergeBytes;
  // What registers have to leave room for.
  static constexpr int kBlocksPerSm =
      D <= 128 && kSharedBytes <= kQuarterOfSm && kHeadTiles == 1 ? 4 : 2;
  static constexpr int kSteps = (KeyShape::kKeyWords * Fragments<K, T>::kDims / 2 + 1) / 2;
  static constexpr int kOutTiles = D / 16;
};

// What a lane knows for the whole kernel.
struct Lane {
  int lane;
  int warp;
  int g;  // 0..7: its row of operands, its head of a head tile's results
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
  char* ring;  // of the warp, in shared memory
  Lane at;
};

}  // namespace turbomind::cuda
