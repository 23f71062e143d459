#pragma once

// Computes y tile = tile · panelᵀ for K-quants in portable code. This is the definition of their
// arithmetic; the other instruction sets give the same bits.

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_scalar.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

// Returns the code of a column of a step. `w` is its first byte of lane `output`.
template <MatrixFormat F>
TM_HD int32_t KCode(const uint8_t* w, int column) {
  const int group = column / 4;
  if constexpr (F == MatrixFormat::kQ6_K) {
    const uint8_t* half = w + group / 4 * 192 + column % 4;
    return group % 4 < 3 ? half[group % 4 * 64] & 63
                         : half[0] >> 6 | half[64] >> 6 << 2 | half[128] >> 6 << 4;
  }
  const int nibble = w[group % 4 * 64 + column % 4] >> (group / 4 * 4) & 15;
  if constexpr (F == MatrixFormat::kQ4_K) {
    return nibble;
  } else {
    return nibble | (w[kFifthBitsAt + column % 4] >> group & 1) << 4;
  }
}

// Returns Σ (code - zero point) * activation over `count` columns from `first` on.
template <MatrixFormat F>
TM_HD int32_t DotK(const uint8_t* w, const uint8_t* a, int first, int count) {
  int32_t sum = 0;
  for (int c = first; c < first + count; ++c) {
    const int32_t x = 256 * static_cast<int8_t>(a[c]) + static_cast<int8_t>(a[kQuantBlock + c]);
    sum += (KCode<F>(w, c) - ZeroPoint(F)) * x;
  }
  return sum;
}

// The scale and the minimum of 32 columns of an output: exact products of FP16 and 6 bits.
struct KScale {
  float scale;
  float minimum;
};

TM_HD KScale LoadKScale(const uint8_t* block, int step, int64_t output) {
  const uint8_t packed = block[kKScalesAt + step * kTileRows + output];
  const uint8_t nibbles = block[kKMinimaAt + step * kTileRows / 2 + output % 8];
  const int minimum = packed >> 6 << 4 | (nibbles >> (output / 8 * 4) & 15);
  return {LoadHalf(block + 2 * output) * static_cast<float>(packed & 63),
          LoadHalf(block + kKMinAt + 2 * output) * static_cast<float>(minimum)};
}

// Returns the scale of 16 columns of an output of kQ6_K, an exact product of FP16 and 8 bits.
TM_HD float LoadQ6Scale(const uint8_t* block, int part, int64_t output) {
  const auto scale = static_cast<int8_t>(block[kQ6ScalesAt + part * kTileRows + output]);
  return LoadHalf(block + 2 * output) * static_cast<float>(scale);
}

// Adds 32 columns of one output, whose super-block is at `block`, for row r of a panel of R rows.
template <MatrixFormat F, int R>
TM_HD float AddKStep(const uint8_t* block, int step, int64_t output, const uint8_t* a, int r,
                     float acc) {
  const uint8_t* codes = block + KCodesAt(F) + step * TileStepBytes(F) + 4 * output;
  const uint8_t* scales = a + R * kQuantRowBytes;  // float d[R]
  const uint8_t* row = a + r * kQuantRowBytes;
  const float d = LoadFloat(scales + 4 * r);
  if constexpr (F == MatrixFormat::kQ6_K) {
    const float first =
        static_cast<float>(DotK<F>(codes, row, 0, 16)) * LoadQ6Scale(block, 2 * step, output);
    const float both = __builtin_fmaf(static_cast<float>(DotK<F>(codes, row, 16, 16)),
                                      LoadQ6Scale(block, 2 * step + 1, output), first);
    return __builtin_fmaf(both, d, acc);
  } else {
    const KScale own = LoadKScale(block, step, output);
    const auto dot = static_cast<float>(DotK<F>(codes, row, 0, kQuantBlock));
    acc = __builtin_fmaf(dot, own.scale * d, acc);
    return __builtin_fmaf(-own.minimum, LoadFloat(scales + R * 4 + 4 * r), acc);
  }
}

template <MatrixFormat F, int R, int T>
void MultiplyKTiles(const TileRun& run) {
  static_assert(T == 1);
  const int64_t outputs = run.num_outputs < kTileRows ? run.num_outputs : kTileRows;
  for (int64_t output = 0; output < outputs; ++output) {
    for (int r = 0; r < R; ++r) {
      float acc = 0.f;
      for (int64_t s = 0; s < run.steps; ++s) {
        acc = AddKStep<F, R>(run.tile + s / kKSteps * TileSuperBlockBytes(F),
                             static_cast<int>(s % kKSteps), output,
                             run.panel + s * PanelStepBytes(F, R), r, acc);
      }
      StoreOutput(run, r, output, acc);
    }
  }
}

}  // namespace turbomind::TM_ISA
