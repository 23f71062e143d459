#pragma once

// Computes y tile = tile · panelᵀ for NVFP4 in portable code. This is the definition of the
// arithmetic; nvfp4_avx2.h gives the same bits. A step adds
//   fma(fma(float(dot1), s1, float(dot0) * s0), d, sum)
// where dot0 and dot1 are the exact sums of 2 * E2M1(code) * activation code over 16 columns each,
// s0 and s1 their scales divided by 256, and d the scale of the activations. The sum over all steps
// is multiplied with the factor of the tile.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_scalar.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

template <int R>
inline constexpr int kNvTilesAtOnce = 1;

// Returns Σ 2 * E2M1(code) * activation over 16 columns, which have the nibbles of one half. `w` is
// the first byte of a lane in a step.
TM_HD int32_t DotNv(const uint8_t* w, const uint8_t* a, int half) {
  int32_t sum = 0;
  for (int i = 0; i < kNvGroup; ++i) {
    const int column = kNvGroup * half + i;
    const uint8_t code = w[i / 4 * 64 + i % 4] >> (4 * half) & 15;
    const int32_t x =
        256 * static_cast<int8_t>(a[column]) + static_cast<int8_t>(a[kQuantBlock + column]);
    sum += static_cast<int32_t>(2.f * E2M1ToFloat(code)) * x;
  }
  return sum;
}

TM_HD float LoadNvScale(uint8_t scale) { return HalfToFloat(static_cast<uint16_t>(scale << 7)); }

// Adds the step at `w` of one output, for row r of a panel of R rows.
template <int R>
TM_HD float AddNvStep(const uint8_t* w, int64_t output, const uint8_t* a, int r, float acc) {
  const uint8_t* codes = w + kNvCodesAt + 4 * output;
  const uint8_t* row = a + r * kQuantRowBytes;
  const float d = LoadFloat(a + R * kQuantRowBytes + 4 * r);
  const float first = static_cast<float>(DotNv(codes, row, 0)) * LoadNvScale(w[output]);
  const float both = __builtin_fmaf(static_cast<float>(DotNv(codes, row, 1)),
                                    LoadNvScale(w[kTileRows + output]), first);
  return __builtin_fmaf(both, d, acc);
}

template <int R, int T>
void MultiplyNvTiles(const TileRun& run) {
  static_assert(T == 1);
  constexpr MatrixFormat kFormat = MatrixFormat::kNvfp4;
  const int64_t outputs = run.num_outputs < kTileRows ? run.num_outputs : kTileRows;
  for (int64_t output = 0; output < outputs; ++output) {
    for (int r = 0; r < R; ++r) {
      float acc = 0.f;
      for (int64_t s = 0; s < run.steps; ++s) {
        acc = AddNvStep<R>(run.tile + kNvHeaderBytes + s * TileStepBytes(kFormat), output,
                           run.panel + s * PanelStepBytes(kFormat, R), r, acc);
      }
      StoreOutput(run, r, output, acc * LoadFloat(run.tile + 4 * output));
    }
  }
}

}  // namespace turbomind::TM_ISA
