#pragma once

// Computes y tile = tile · panelᵀ for activations of 8 bits in portable code. This is the
// definition of their arithmetic: that of linear_scalar.h and k_quants_scalar.h, with one int8 code
// for an activation instead of two halves.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/k_quants_scalar.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_scalar.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

template <MatrixFormat F, int R>
inline constexpr int kInt8TilesAtOnce = 1;

TM_HD constexpr int Int8RowBytes(MatrixFormat /*format*/) { return kQuantBlock; }

// The codes stay in the order of the columns.
TM_HD void ArrangeInt8Row(MatrixFormat /*format*/, uint8_t* /*row*/) {}

// Returns Σ (code - zero point) * activation over `count` columns from `first` on.
template <MatrixFormat F>
TM_HD float DotInt8(const uint8_t* w, const uint8_t* a, int first, int count) {
  int32_t sum = 0;
  for (int c = first; c < first + count; ++c) {
    int32_t code;
    if constexpr (IsKQuant(F)) {
      code = KCode<F>(w, c);
    } else {
      code = QuantCode<F>(w, c);
    }
    sum += (code - ZeroPoint(F)) * static_cast<int8_t>(a[c]);
  }
  return static_cast<float>(sum);
}

// The activations of a row in one step.
struct Int8Row {
  const uint8_t* codes;
  float d;
  float sum;  // d * Σ codes, for formats with minima
};

TM_HD Int8Row RowOfStep(MatrixFormat format, const uint8_t* step, int rows, int r) {
  const uint8_t* scales = step + rows * kQuantBlock + 4 * r;  // float d[rows], then the sums
  return {step + r * kQuantBlock, LoadFloat(scales),
          HasMinimum(format) ? LoadFloat(scales + 4 * rows) : 0.f};
}

// Adds one step of an output of a K-quant.
template <MatrixFormat F>
TM_HD float AddInt8KStep(const uint8_t* tile, int64_t s, int64_t output, const Int8Row& row,
                         float acc) {
  const uint8_t* block = tile + s / kKSteps * TileSuperBlockBytes(F);
  const int step = static_cast<int>(s % kKSteps);
  const uint8_t* w = block + KCodesAt(F) + step * TileStepBytes(F) + 4 * output;
  if constexpr (F == MatrixFormat::kQ6_K) {
    const float first = DotInt8<F>(w, row.codes, 0, 16) * LoadQ6Scale(block, 2 * step, output);
    const float both = __builtin_fmaf(DotInt8<F>(w, row.codes, 16, 16),
                                      LoadQ6Scale(block, 2 * step + 1, output), first);
    return __builtin_fmaf(both, row.d, acc);
  } else {
    const KScale own = LoadKScale(block, step, output);
    acc = __builtin_fmaf(DotInt8<F>(w, row.codes, 0, kQuantBlock), own.scale * row.d, acc);
    return __builtin_fmaf(-own.minimum, row.sum, acc);
  }
}

template <MatrixFormat F>
TM_HD float AddInt8Step(const uint8_t* tile, int64_t s, int64_t output, const Int8Row& row,
                        float acc) {
  if constexpr (IsKQuant(F)) {
    return AddInt8KStep<F>(tile, s, output, row, acc);
  } else {
    const uint8_t* meta = tile + s * TileStepBytes(F);
    const uint8_t* w = meta + TileMetaBytes(F) + 4 * output;
    const float scale = LoadHalf(meta + 2 * output) * row.d;
    acc = __builtin_fmaf(DotInt8<F>(w, row.codes, 0, kQuantBlock), scale, acc);
    return HasMinimum(F) ? __builtin_fmaf(LoadHalf(meta + 32 + 2 * output), row.sum, acc) : acc;
  }
}

template <MatrixFormat F, int R, int T>
void MultiplyInt8Tiles(const TileRun& run) {
  static_assert(T == 1);
  const int64_t outputs = run.num_outputs < kTileRows ? run.num_outputs : kTileRows;
  for (int64_t output = 0; output < outputs; ++output) {
    for (int r = 0; r < R; ++r) {
      float acc = 0.f;
      for (int64_t s = 0; s < run.steps; ++s) {
        const uint8_t* step = run.panel + s * Int8PanelStepBytes(F, R, kQuantBlock);
        acc = AddInt8Step<F>(run.tile, s, output, RowOfStep(F, step, R, r), acc);
      }
      StoreOutput(run, r, output, acc);
    }
  }
}

}  // namespace turbomind::TM_ISA
