#pragma once

// Computes y tile = tile · panelᵀ in portable code: slow, but the simplest definition of the
// arithmetic. The sums and their order are those of linear_avx512.h, so the bits are the same.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

// The codes of activations stay in QuantizeBlock's layout.
TM_HD void ArrangeRow(MatrixFormat /*format*/, uint8_t* /*row*/) {}

template <int R>
inline constexpr int kTilesAtOnce = 1;

TM_HD float LoadFloat(const uint8_t* p) { return LoadAs(p, DataType::kFloat32, 0); }
TM_HD float LoadHalf(const uint8_t* p) { return LoadAs(p, DataType::kFloat16, 0); }

// Returns the code of a column of a step. `w` is its first byte of an output.
template <MatrixFormat F>
TM_HD int32_t QuantCode(const uint8_t* w, int column) {
  const int group = column / 4;
  if constexpr (F == MatrixFormat::kQ8_0) {
    return w[64 * group + column % 4];
  } else {
    const uint8_t pair = w[64 * (group % 4) + column % 4];
    return group < 4 ? pair & 0x0f : pair >> 4;
  }
}

// Returns Σ (code - zero point) * activation of one block, for one output and one row.
template <MatrixFormat F>
TM_HD int32_t DotBlock(const uint8_t* w, const uint8_t* a) {
  int32_t sum = 0;
  for (int c = 0; c < kQuantBlock; ++c) {
    const int32_t x = 256 * static_cast<int8_t>(a[c]) + static_cast<int8_t>(a[kQuantBlock + c]);
    sum += (QuantCode<F>(w, c) - ZeroPoint(F)) * x;
  }
  return sum;
}

// Adds one output of the step at `w`, for row r of a panel of R rows.
template <MatrixFormat F, int R>
TM_HD float AddStep(const uint8_t* w, int64_t output, const uint8_t* a, int r, float acc) {
  const uint8_t* meta = w + 2 * output;
  w += TileMetaBytes(F) + 4 * output;
  if constexpr (F == MatrixFormat::kF32) {
    return __builtin_fmaf(LoadFloat(w), LoadFloat(a + 4 * r), acc);
  } else if constexpr (F == MatrixFormat::kBF16) {
    const uint8_t* x = a + 4 * r;  // the odd element first, as vdpbf16ps does
    const auto fma = [&](int i, float sum) {
      return __builtin_fmaf(LoadAs(w, DataType::kBFloat16, i), LoadAs(x, DataType::kBFloat16, i),
                            sum);
    };
    return fma(0, fma(1, acc));
  } else {
    const uint8_t* scales = a + R * kQuantRowBytes;
    const float scale = LoadHalf(meta) * LoadFloat(scales + 4 * r);
    acc = __builtin_fmaf(static_cast<float>(DotBlock<F>(w, a + r * kQuantRowBytes)), scale, acc);
    if constexpr (F == MatrixFormat::kQ4_1) {
      acc = __builtin_fmaf(LoadHalf(meta + 32), LoadFloat(scales + R * 4 + 4 * r), acc);
    }
    return acc;
  }
}

// Writes one output of row r.
TM_HD void StoreOutput(const TileRun& run, int r, int64_t output, float acc) {
  float* y = run.y + r * run.y_stride + output;
  const float out = run.bias != nullptr ? acc + run.bias[output] : acc;
  *y = run.accumulate ? out + *y : out;
}

template <MatrixFormat F, int R, int T>
void MultiplyTiles(const TileRun& run) {
  static_assert(T == 1);
  const int64_t outputs = run.num_outputs < kTileRows ? run.num_outputs : kTileRows;
  for (int64_t output = 0; output < outputs; ++output) {
    for (int r = 0; r < R; ++r) {
      float acc = 0.f;
      for (int64_t s = 0; s < run.steps; ++s) {
        acc = AddStep<F, R>(run.tile + s * TileStepBytes(F), output,
                            run.panel + s * PanelStepBytes(F, R), r, acc);
      }
      StoreOutput(run, r, output, acc);
    }
  }
}

}  // namespace turbomind::TM_ISA
