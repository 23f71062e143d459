#pragma once

// ⑦ The softmax of a prefill tile: turns the scores of a block of query rows into weights. With
// AVX-512, rows that see all of the tile are processed four at a time.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_fast_bias.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax_rows.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"

namespace turbomind::TM_ISA {

TM_HD float ScaleOfRow(const Block& b, const View& view, int row) {
  return view.fns.round != nullptr ? view.scale * b.queries->scale[row] : view.scale;
}

// Fills the shifts of a tile, of which the rows see `any`. They are zero if blocks have no K
// offset.
inline void ShiftScores(const Block& b, const View& view, int tile, const Seen& any) {
  if (!view.kv.layer->HasKOffset()) {
    __builtin_memset(b.shift, 0, sizeof(float) * b.rows * kTileRuns);
    return;
  }
  const int begin = any.begin / 16 * 16;
  ShiftRows(view.kv, tile + begin, tile + any.end,
            {b.q, b.qsum, b.rows, view.offset_scale, b.shift + begin / 16, kTileRuns});
}

// Adds the scores of the fast bias to the sums of a row.
inline void AddFastBias(const Block& b, const View& view, int tile, int row, float scale,
                        float* sums) {
  const FastBias& bias = b.args->fast_bias;
  if (bias.num_pairs > 0) {
    AddWaves(bias, view.kv.head, tile, b.amplitudes + row * 2 * bias.num_pairs, scale, sums);
  }
}

// Caps the row's scores if the model does, and returns the factor from sums to scores.
inline float ScoreScaleOfRow(const Block& b, const View& view, int row) {
  const float scale = ScaleOfRow(b, view, row);
  if (b.args->score_cap == 0.f) {
    return scale;
  }
  float* shift = b.shift + row * kTileRuns;
  CapScores(b.scores + row * kTileTokens, {scale, shift}, b.args->score_cap);
  __builtin_memset(shift, 0, kTileRuns * sizeof(float));
  return 1.f;
}

inline void UpdateRow(const Block& b, const View& view, int tile, int row) {
  const Seen seen = SeenByRow(b, view, tile, row);
  float* scores = b.scores + row * kTileTokens;
  if (seen.begin >= seen.end) {
    b.old[row] = 1.f;
    b.tile[row] = 0.f;
    __builtin_memset(scores, 0, kTileTokens * sizeof(float));
  } else {
    const float scale = ScoreScaleOfRow(b, view, row);
    UpdateOneRow({scores, &scale, b.shift + row * kTileRuns, kTileRuns, b.state + row, b.old + row,
                  b.tile + row, view.value_scale},
                 seen, view.fns.rounds_weights);
  }
}

#if defined(TM_ISA_avx512)

inline int UpdateRowsInFours(const Block& b, const View& view) {
  int row = 0;
  for (; row + 4 <= b.rows; row += 4) {
    float scale[4];
    for (int r = 0; r < 4; ++r) {
      scale[r] = ScoreScaleOfRow(b, view, row + r);
    }
    UpdateRows<4>({b.scores + row * kTileTokens, scale, b.shift + row * kTileRuns, kTileRuns,
                   b.state + row, b.old + row, b.tile + row, view.value_scale});
  }
  return row;
}

#else
inline int UpdateRowsInFours(const Block& /*block*/, const View& /*view*/) { return 0; }
#endif

// Updates all rows. `all` must be true only if every row sees all of the tile.
inline void UpdateSoftmax(const Block& b, const View& view, int tile, bool all) {
  int row = all && view.fns.rounds_weights ? UpdateRowsInFours(b, view) : 0;
  for (; row < b.rows; ++row) {
    UpdateRow(b, view, tile, row);
  }
}

}  // namespace turbomind::TM_ISA
