#pragma once

// ⑦ The part of a tile's scores that comes from the K offsets of its blocks (kv/k_offset.h): one
// product per query row and block.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

inline constexpr int kTileRuns = kTileTokens / 16;  // a block has whole runs of 16 tokens

// The decoded K offsets of a tile.
struct TileOffsets {
  // Of each run of 16 tokens: adjacent runs of one block share a row. Null if the run is not read.
  const float* of[kTileRuns];
  alignas(64) float rows[kTileRuns][kMaxHeadDim];
};

// Writes the K offset of a block, as FP32.
TM_HD void LoadKOffset(const KvLayerView& layer, int64_t block, int head, float* row) {
  const KvRow from = layer.KOffset(block, head);
  const F32x16 scale = Set1(LoadAs(from.metadata, layer.dtype, 0));
  const F32x16 zero = Set1(LoadAs(from.metadata, layer.dtype, 1));
  for (int d = 0; d < layer.head_dim; d += kLanes) {
    Store(row + d, Add(Mul(ToFloat(LoadBytes(from.payload + d)), scale), zero));
  }
}

// Loads the offsets of the runs of a tile that touch `seen`. REQUIRES: the layer has K offsets.
inline void OpenOffsets(const KvHead& kv, int tile, const Seen& seen, TileOffsets* out) {
  const KvLayerView& layer = *kv.layer;
  const int block_shift = __builtin_ctz(static_cast<unsigned>(layer.block_seq_len));
  int64_t last = -1;
  for (int i = 0; i < kTileRuns; ++i) {
    out->of[i] = nullptr;
    if (16 * i >= seen.end || 16 * i + 16 <= seen.begin) {
      continue;
    }
    const int64_t block = kv.blocks[(tile + 16 * i) >> block_shift];
    if (block >= 0 && block == last) {
      out->of[i] = out->of[i - 1];
    } else if (block >= 0) {
      LoadKOffset(layer, block, kv.head, out->rows[i]);
      out->of[i] = out->rows[i];
    }
    last = block;
  }
}

// Writes factor * (q · offset) of each run to shift[kTileRuns].
TM_HD void ScoreOffsets(const TileOffsets& offsets, const float* q, int head_dim, float factor,
                        float* shift) {
  for (int i = 0; i < kTileRuns; ++i) {
    const float* row = offsets.of[i];
    shift[i] = row == nullptr                      ? 0.f
               : i > 0 && row == offsets.of[i - 1] ? shift[i - 1]
                                                   : factor * DotRow(q, row, head_dim);
  }
}

}  // namespace turbomind::TM_ISA
