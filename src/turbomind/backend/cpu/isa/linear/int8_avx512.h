#pragma once

// Computes y tile = tile · panelᵀ for activations of 8 bits with AVX-512 VNNI: half the products of
// linear_avx512.h, which are 8 vpdpbusd per block of 32 columns, row and tile. The sums and their
// order are those of int8_scalar.h, so the bits are the same.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/k_quants_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/simd/broadcast_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

template <MatrixFormat F, int R>
inline constexpr int kInt8TilesAtOnce = kTilesAtOnce<R>;

TM_HD constexpr int Int8RowBytes(MatrixFormat /*format*/) { return kQuantBlock; }

// The codes stay in the order of the columns.
TM_HD void ArrangeInt8Row(MatrixFormat /*format*/, uint8_t* /*row*/) {}

// Adds one step of a tile for all rows.
template <MatrixFormat F, int R>
TM_HD void AddInt8Step(const uint8_t* w, const uint8_t* a, __m512 (&acc)[R]) {
  const uint8_t* offsets = a + R * (kQuantBlock + 4);  // int32[R] unless F has minima
  __m512i sum[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = HasMinimum(F) ? _mm512_setzero_si512() : Broadcast32(offsets + 4 * r);
  }
  DotBlock<F, R, kQuantBlock>(w + TileMetaBytes(F), a, sum);
  AddSums<F, R, kQuantBlock>(sum, w, a, acc);
}

// Adds the products of 4 columns of kQ5_K or kQ6_K for all rows.
template <MatrixFormat F, int R, int kHalf, int kGroup>
TM_HD void DotInt8Group(const uint8_t* w, const uint8_t* a, __m512i (&sum)[R]) {
  const __m512i codes =
      _mm512_and_si512(LoadWideCodes<F, kHalf, kGroup>(w), _mm512_set1_epi8(kWideMask<F>));
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_dpbusd_epi32(
        sum[r], codes, Broadcast32(a + kQuantBlock * r + kQuantBlock / 2 * kHalf + 4 * kGroup));
  }
}

// Adds the products of 16 columns of kQ5_K or kQ6_K for all rows.
template <MatrixFormat F, int R, int kHalf>
TM_HD void DotInt8Half(const uint8_t* w, const uint8_t* a, __m512i (&sum)[R]) {
  DotInt8Group<F, R, kHalf, 0>(w, a, sum);
  DotInt8Group<F, R, kHalf, 1>(w, a, sum);
  DotInt8Group<F, R, kHalf, 2>(w, a, sum);
  DotInt8Group<F, R, kHalf, 3>(w, a, sum);
}

// Adds 32 columns of a K-quant for all rows. `w` are their codes.
template <MatrixFormat F, int R>
TM_HD void AddInt8KStep(const uint8_t* w, const KScales& own, const uint8_t* a, __m512 (&acc)[R]) {
  if constexpr (F == MatrixFormat::kQ6_K) {
    AddQ6StepWith<R, kQuantBlock>(
        own, a, acc, [&]<int kHalf>(__m512i(&sum)[R]) __attribute__((always_inline)) {
          DotInt8Half<F, R, kHalf>(w, a, sum);
        });
  } else {
    __m512i sum[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r] = _mm512_setzero_si512();
    }
    if constexpr (F == MatrixFormat::kQ4_K) {
      DotBlock<F, R, kQuantBlock>(w, a, sum);
    } else {
      DotInt8Half<F, R, 0>(w, a, sum);
      DotInt8Half<F, R, 1>(w, a, sum);
    }
    AddKSums<R, kQuantBlock>(sum, own, a, acc);
  }
}

template <MatrixFormat F, int R, int T>
void MultiplyInt8Tiles(const TileRun& run) {
  if constexpr (IsKQuant(F)) {
    MultiplyKTilesWith<F, R, T, Int8PanelStepBytes(F, R, kQuantBlock)>(
        run, [](const uint8_t* w, const KScales& own, const uint8_t* a, __m512(&acc)[R])
                 __attribute__((always_inline)) { AddInt8KStep<F, R>(w, own, a, acc); });
  } else {
    MultiplyTilesWith<F, R, T, Int8PanelStepBytes(F, R, kQuantBlock)>(
        run, [](const uint8_t* w, const uint8_t* a, __m512(&acc)[R])
                 __attribute__((always_inline)) { AddInt8Step<F, R>(w, a, acc); });
  }
}

}  // namespace turbomind::TM_ISA
