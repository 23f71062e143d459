#pragma once

// Computes y tile = tile · panelᵀ for activations of 12 bits (int12_activations.h) with AVX-512
// VNNI. Lanes are the 16 outputs of a tile.
//
// Per block of 32 columns, row and tile: 12 vpdpbusd of 64 products instead of the 16 of
// linear_avx512.h. 8 multiply the coarse codes with unpacked weights. 4 multiply the residuals with
// the bytes of the tile as they are, each of which holds the codes of two columns.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/k_quants_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/simd/broadcast_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// Sets sum[r] = offset[r] + Σ code * activation for a block of codes of kQ4_0. `a` is the step of
// the panel.
template <MatrixFormat F, int R>
TM_HD void DotInt12(const uint8_t* codes, const uint8_t* a, __m512i (&sum)[R]) {
  const uint8_t* offsets = a + R * (kInt12RowBytes + 4);  // int32[R] unless F has minima
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_setzero_si512();
  }
  DotBlock<F, R, kInt12RowBytes>(codes, a, sum);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_slli_epi32(sum[r], 8);
    if constexpr (!HasMinimum(F)) {
      sum[r] = _mm512_add_epi32(sum[r], Broadcast32(offsets + 4 * r));
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512i pairs = _mm512_loadu_si512(codes + 64 * g);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const uint8_t* residuals = a + kInt12RowBytes * r + kQuantBlock + 4 * g;
      sum[r] = _mm512_dpbusd_epi32(sum[r], pairs, Broadcast32(residuals));
    }
  }
}

template <MatrixFormat F, int R, int T>
void MultiplyInt12Tiles(const TileRun& run) {
  constexpr int kStep = Int12PanelStepBytes(R);
  if constexpr (IsKQuant(F)) {
    MultiplyKTilesWith<F, R, T, kStep>(
        run, [](const uint8_t* w, const KScales& own, const uint8_t* a, __m512(&acc)[R])
                 __attribute__((always_inline)) {
                   __m512i sum[R];
                   DotInt12<F, R>(w, a, sum);
                   AddKSums<R, kInt12RowBytes>(sum, own, a, acc);
                 });
  } else {
    MultiplyTilesWith<F, R, T, kStep>(
        run,
        [](const uint8_t* w, const uint8_t* a, __m512(&acc)[R]) __attribute__((always_inline)) {
          __m512i sum[R];
          DotInt12<F, R>(w + TileMetaBytes(F), a, sum);
          AddSums<F, R, kInt12RowBytes>(sum, w, a, acc);
        });
  }
}

}  // namespace turbomind::TM_ISA
