#pragma once

// ⑦ The data of the prefill attention kernels: the query rows of one item and one tile.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_integer.h"
#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_offset.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"

namespace turbomind::TM_ISA {

#if defined(TM_ISA_avx512)
inline constexpr int kRows = 6;
inline constexpr int kColumns = 4;
#else
inline constexpr int kRows = 2;
inline constexpr int kColumns = 2;
#endif

inline constexpr int kRegisterRows = 16;    // of an AMX tile register
inline constexpr int kTileRegister = 1024;  // its bytes

// The queries of an item, rounded for the integer keys of one view.
struct RoundedRows {
  int32_t* pairs = nullptr;  // [rows, head_dim / 2]
  float* scale = nullptr;    // [rows] RoundedQuery
  float* sum = nullptr;      // [rows]
};

// The working data of one item. The arrays point into the caller's scratch. o and state have rows
// up to a multiple of kRegisterRows.
struct Block {
  const PrefillRowsArgs* args = nullptr;
  int head_dim = 0;
  int rows = 0;  // tokens * group
  // FP32 kernels store [head_dim, kTileTokens] and [kTileTokens, head_dim]. Integer kernels store
  // pairs of dimensions [head_dim / 2, kTileTokens] and pairs of tokens [kTilePairs, head_dim].
  // Values are in the order of the layer's values.
  float* keys = nullptr;
  float* values = nullptr;
  TileSide side[2];
  float* scores = nullptr;  // [rows, kTileTokens]
  float* q = nullptr;       // [rows, head_dim]
  float* o = nullptr;       // [rows, head_dim] for the split
  float* total_o = nullptr;
  SoftmaxState* state = nullptr;  // [rows] for the split
  SoftmaxState* total = nullptr;
  float* old = nullptr;                  // [rows] SoftmaxState::Factors of the tile
  float* tile = nullptr;                 // [rows]
  float* qsum = nullptr;                 // [rows]
  RoundedRows rounded[2];                // by view: queries for integer keys
  const RoundedRows* queries = nullptr;  // of the tile's view
  float* halves = nullptr;               // queries for AMX: [rows, a multiple of 16][head_dim + 16]
  float* shift = nullptr;                // [rows, kTileRuns] q · K offset
  float* amplitudes = nullptr;           // [rows, 2 * num_pairs] of the fast bias
  Visible* visible = nullptr;            // [tokens]

  int32_t* key_pairs() const { return reinterpret_cast<int32_t*>(keys); }
  int32_t* value_pairs() const { return reinterpret_cast<int32_t*>(values); }
};

struct View;

// The functions that process a tile, selected by the storage of K and V.
struct TileFns {
  void (*unpack_keys)(const Block&) = nullptr;
  void (*score)(const Block&) = nullptr;
  // Adds the positions `any` of the tile that begins at position `tile`. The scores are now
  // weights.
  void (*add_values)(const Block&, const View&, int tile, const Seen& any) = nullptr;
  RoundedQuery (*round)(const float* q, int head_dim, int32_t* pairs) = nullptr;  // null: FP32 keys
  bool rounds_weights = false;
};

// One view of the cache: the layer's quantized pool or its window.
struct View {
  KvHead kv;
  TileFns fns;
  float scale = 1.f;         // factor from sums to scores
  float offset_scale = 1.f;  // factor from q · K offset to scores
  float value_scale = 1.f;   // factor of the weights of its values
  bool window16 = false;
  bool interleave = false;  // its values must be reordered to the order of o
};

inline Seen SeenByRow(const Block& b, const View& view, int tile, int row) {
  return SeenOf(b.visible[row / b.args->group], tile, view.window16);
}

// Returns the smallest range that covers what any of the rows sees.
inline Seen SeenByAny(const Block& b, const View& view, int tile) {
  Seen all = {kTileTokens, 0};
  for (int token = 0; token < b.args->num_tokens; ++token) {
    const Seen seen = SeenOf(b.visible[token], tile, view.window16);
    if (seen.begin < seen.end) {
      all = {MinOf(all.begin, seen.begin), MaxOf(all.end, seen.end)};
    }
  }
  return all;
}

// Returns true if every row sees all of the tile.
inline bool AllSeeAll(const Block& b, const View& view, int tile) {
  for (int token = 0; token < b.args->num_tokens; ++token) {
    const Seen seen = SeenOf(b.visible[token], tile, view.window16);
    if (seen.begin != 0 || seen.end != kTileTokens) {
      return false;
    }
  }
  return true;
}

}  // namespace turbomind::TM_ISA
