#pragma once

// Computes y tile = tile · panelᵀ with AVX-512 VNNI and BF16. Lanes are the 16 outputs of a tile.
//
// Per block of 32 columns, row and tile: 16 vpdpbusd of 64 products (8 for the high halves of the
// activations, 8 for the low ones). One shift, one addition, one conversion, one multiply and one
// FMA into the FP32 accumulator follow. Zen 4 retires one 512-bit vpdpbusd per cycle, so R >= 8
// rows reach about 80 % of that. One row is bound by reading the weights.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/arrange_shorts.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/simd/broadcast_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// Rearranges a row of a step from QuantizeBlock's layout to that of the kernels: int16 for
// K-quants whose codes have more than 4 bits.
TM_HD void ArrangeRow(MatrixFormat format, uint8_t* row) {
  if (format == MatrixFormat::kQ5_K || format == MatrixFormat::kQ6_K) {
    ArrangeShorts(row);
  }
}

// Tiles per call: several tiles hide latency when there are few rows.
template <int R>
inline constexpr int kTilesAtOnce = R == 1   ? 4
                                    : R <= 3 ? 2
                                             : 1;

TM_HD __m512 LoadHalf16(const uint8_t* p) {
  // Use the zero-masked form: g++ 12 warns of an uninitialized value in the plain one.
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Adds the integer products of one block and one half of the activations: sum[r] += Σ code * half.
// A row of the panel takes kRow bytes.
template <MatrixFormat F, int R, int kRow = kQuantRowBytes>
TM_HD void DotBlock(const uint8_t* w, const uint8_t* a, __m512i (&sum)[R]) {
  if constexpr (F == MatrixFormat::kQ8_0) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __m512i codes = _mm512_loadu_si512(w + 64 * g);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_dpbusd_epi32(sum[r], codes, Broadcast32(a + kRow * r + 4 * g));
      }
    }
  } else {
    const __m512i mask = _mm512_set1_epi8(0x0f);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const __m512i codes = _mm512_loadu_si512(w + 64 * g);
      const __m512i low = _mm512_and_si512(codes, mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_dpbusd_epi32(sum[r], low, Broadcast32(a + kRow * r + 4 * g));
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_dpbusd_epi32(sum[r], high, Broadcast32(a + kRow * r + 16 + 4 * g));
      }
    }
  }
}

// Scales and adds the sums of a step for all rows. `w` is the step of the tile, `a` that of the
// panel, whose rows take kRow bytes.
template <MatrixFormat F, int R, int kRow>
TM_HD void AddSums(const __m512i (&sum)[R], const uint8_t* w, const uint8_t* a, __m512 (&acc)[R]) {
  const uint8_t* scales = a + R * kRow;     // float d[R]
  const uint8_t* offsets = scales + R * 4;  // float d*sum[R]
  const __m512 d = LoadHalf16(w);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    acc[r] = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sum[r]),
                             _mm512_mul_ps(d, BroadcastFloat(scales + 4 * r)), acc[r]);
  }
  if constexpr (HasMinimum(F)) {
    const __m512 m = LoadHalf16(w + 32);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r] = _mm512_fmadd_ps(m, BroadcastFloat(offsets + 4 * r), acc[r]);
    }
  }
}

template <MatrixFormat F, int R>
TM_HD void AddQuantStep(const uint8_t* w, const uint8_t* a, __m512 (&acc)[R]) {
  const uint8_t* offsets = a + R * (kQuantRowBytes + 4);  // int32[R] unless F has minima
  __m512i sum[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_setzero_si512();
  }
  DotBlock<F, R>(w + TileMetaBytes(F), a, sum);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_slli_epi32(sum[r], 8);
    if constexpr (!HasMinimum(F)) {
      sum[r] = _mm512_add_epi32(sum[r], Broadcast32(offsets + 4 * r));
    }
  }
  DotBlock<F, R>(w + TileMetaBytes(F), a + kQuantBlock, sum);
  AddSums<F, R, kQuantRowBytes>(sum, w, a, acc);
}

template <MatrixFormat F, int R>
TM_HD void AddStep(const uint8_t* w, const uint8_t* a, __m512 (&acc)[R]) {
  if constexpr (F == MatrixFormat::kF32) {
    const __m512 column = _mm512_loadu_ps(w);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r] = _mm512_fmadd_ps(column, BroadcastFloat(a + 4 * r), acc[r]);
    }
  } else if constexpr (F == MatrixFormat::kBF16) {
    const __m512bh columns = (__m512bh)_mm512_loadu_si512(w);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r] = _mm512_dpbf16_ps(acc[r], columns, (__m512bh)Broadcast32(a + 4 * r));
    }
  } else {
    AddQuantStep<F, R>(w, a, acc);
  }
}

template <MatrixFormat F, int R, int T>
TM_HD void StoreTiles(const TileRun& run, const __m512 (&acc)[T][R]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const int64_t left = run.num_outputs - t * kTileRows;
    const __mmask16 lanes = static_cast<__mmask16>(left >= kTileRows ? 0xffff : (1 << left) - 1);
    const __m512 bias = run.bias != nullptr ? _mm512_maskz_loadu_ps(lanes, run.bias + t * kTileRows)
                                            : _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      float* y = run.y + r * run.y_stride + t * kTileRows;
      __m512 out = run.bias != nullptr ? _mm512_add_ps(acc[t][r], bias) : acc[t][r];
      if (run.accumulate) {
        out = _mm512_add_ps(out, _mm512_maskz_loadu_ps(lanes, y));
      }
      _mm512_mask_storeu_ps(y, lanes, out);
    }
  }
}

// Sums T tiles. add_step(tile step, panel step, acc) adds one step of a tile; a step of the panel
// takes kPanelStep bytes.
template <MatrixFormat F, int R, int T, int kPanelStep, class AddFn>
TM_HD void SumTilesWith(const TileRun& run, const AddFn& add_step, __m512 (&acc)[T][R]) {
  constexpr int kStep = TileStepBytes(F);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[t][r] = _mm512_setzero_ps();
    }
  }
  const uint8_t* next = run.next;
  for (int64_t s = 0; s < run.steps; ++s, next += T * kStep) {
    if constexpr (R > 1) {  // one row relies on the hardware prefetcher
#pragma GCC unroll 18
      for (int line = 0; line < T * kStep; line += 64) {
        _mm_prefetch(next + line, _MM_HINT_T0);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      add_step(run.tile + t * run.tile_bytes + s * kStep, run.panel + s * kPanelStep, acc[t]);
    }
  }
}

// Multiplies T tiles; see SumTilesWith.
template <MatrixFormat F, int R, int T, int kPanelStep, class AddFn>
TM_HD void MultiplyTilesWith(const TileRun& run, const AddFn& add_step) {
  __m512 acc[T][R];
  SumTilesWith<F, R, T, kPanelStep>(run, add_step, acc);
  StoreTiles<F, R, T>(run, acc);
}

template <MatrixFormat F, int R, int T>
void MultiplyTiles(const TileRun& run) {
  MultiplyTilesWith<F, R, T, PanelStepBytes(F, R)>(
      run, [](const uint8_t* w, const uint8_t* a, __m512(&acc)[R])
               __attribute__((always_inline)) { AddStep<F, R>(w, a, acc); });
}

}  // namespace turbomind::TM_ISA
