#pragma once

// Computes y tile = tile · panelᵀ for activations of 8 bits with AVX-512 VNNI: half the products of
// linear_avx512.h, which are 8 vpdpbusd per block of 32 columns, row and tile. The sums and their
// order are those of int8_scalar.h, so the bits are the same.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/simd/broadcast_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

template <MatrixFormat F, int R>
inline constexpr int kInt8TilesAtOnce = kTilesAtOnce<R>;
// The loader converts K-quants for these kernels.
inline constexpr bool kComputesInt8KQuants = false;

TM_HD constexpr int Int8RowBytes(MatrixFormat /*format*/) { return kQuantBlock; }

// The codes stay in the order of the columns.
TM_HD void ArrangeInt8Row(MatrixFormat /*format*/, uint8_t* /*row*/) {}

// Adds one step of a tile for all rows.
template <MatrixFormat F, int R>
TM_HD void AddInt8Step(const uint8_t* w, const uint8_t* a, __m512 (&acc)[R]) {
  const uint8_t* scales = a + R * kQuantBlock;  // float d[R]
  const uint8_t* offsets = scales + R * 4;
  __m512i sum[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = HasMinimum(F) ? _mm512_setzero_si512() : Broadcast32(offsets + 4 * r);
  }
  DotBlock<F, R, kQuantBlock>(w + TileMetaBytes(F), a, sum);
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

template <MatrixFormat F, int R, int T>
void MultiplyInt8Tiles(const TileRun& run) {
  if constexpr (IsKQuant(F)) {
    __builtin_trap();  // the device packs no such matrix
  } else {
    MultiplyTilesWith<F, R, T, Int8PanelStepBytes(F, R, kQuantBlock)>(
        run, [](const uint8_t* w, const uint8_t* a, __m512(&acc)[R])
                 __attribute__((always_inline)) { AddInt8Step<F, R>(w, a, acc); });
  }
}

}  // namespace turbomind::TM_ISA
