#pragma once

// Computes y tile = tile · panelᵀ for NVFP4 with AVX-512 VNNI. Lanes are the 16 outputs of a tile.
// The sums and their order are those of nvfp4_scalar.h, so the bits are the same. Codes are looked
// up as 2 * E2M1 + 12, and the offsets of the panel subtract 12 times the sums of the activations.
//
// Per step of 32 columns and tile: 8 permutations of bytes and 4 shifts for all rows. 16 vpdpbusd
// of 64 products and 9 more instructions follow for each row. The codes of a step stay in 8
// registers and a row is finished before the next one, so 12 accumulators fit beside them.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/k_quants_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/simd/broadcast_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// Two rows of two tiles at once took 2.4 times as long: each tile has 8 registers of codes.
template <int R>
inline constexpr int kNvTilesAtOnce = R == 1 ? 4 : 1;

// Looks up the low nibbles of bytes. The 16 numbers appear four times, because a permutation of
// bytes uses six bits of each index: a nibble needs no mask.
TM_HD __m512i LookUpNv(__m512i nibbles) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm512_permutexvar_epi8(nibbles, table);
}

// Returns the scales at p, divided by 256.
TM_HD __m512 LoadNvScale(const uint8_t* p) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(Load16Bytes(p)), 7);
  return _mm512_maskz_cvtph_ps(0xffff, halves);
}

// The 32 columns of a step: four columns of 16 outputs in each register.
struct NvWeights {
  __m512i first[4];  // the columns of the first scale
  __m512i second[4];
  KScales own;
};

TM_HD NvWeights LoadNvStep(const uint8_t* w) {
  NvWeights weights;
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512i pairs = _mm512_loadu_si512(w + kNvCodesAt + 64 * g);
    weights.first[g] = LookUpNv(pairs);
    weights.second[g] = LookUpNv(_mm512_srli_epi16(pairs, 4));
  }
  weights.own = {LoadNvScale(w), LoadNvScale(w + kTileRows)};
  return weights;
}

// Returns Σ 2 * E2M1 * activation over 16 columns for one row.
TM_HD __m512 DotNv(const __m512i (&codes)[4], const uint8_t* a, const uint8_t* offset) {
  __m512i high = _mm512_setzero_si512();
  __m512i low = Broadcast32(offset);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    high = _mm512_dpbusd_epi32(high, codes[g], Broadcast32(a + 4 * g));
    low = _mm512_dpbusd_epi32(low, codes[g], Broadcast32(a + kQuantBlock + 4 * g));
  }
  const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  return _mm512_maskz_cvtepi32_ps(0xffff, sum);
}

// Adds the step at `w` for all rows.
template <int R>
TM_HD void AddNvStep(const uint8_t* w, const uint8_t* a, __m512 (&acc)[R]) {
  const uint8_t* scales = a + R * kQuantRowBytes;  // float d[R]
  const uint8_t* offsets = scales + R * 4;         // int32[2][R]
  const NvWeights weights = LoadNvStep(w);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const uint8_t* row = a + r * kQuantRowBytes;
    const __m512 first = DotNv(weights.first, row, offsets + 4 * r);
    const __m512 second = DotNv(weights.second, row + kNvGroup, offsets + 4 * (R + r));
    const __m512 both =
        _mm512_fmadd_ps(second, weights.own.second, _mm512_mul_ps(first, weights.own.scale));
    acc[r] = _mm512_fmadd_ps(both, BroadcastFloat(scales + 4 * r), acc[r]);
  }
}

template <int R, int T>
void MultiplyNvTiles(const TileRun& run) {
  constexpr MatrixFormat kFormat = MatrixFormat::kNvfp4;
  TileRun steps = run;
  steps.tile += kNvHeaderBytes;
  __m512 acc[T][R];
  SumTilesWith<kFormat, R, T, PanelStepBytes(kFormat, R)>(
      steps,
      [](const uint8_t* w, const uint8_t* a, __m512(&sums)[R])
          __attribute__((always_inline)) { AddNvStep<R>(w, a, sums); },
      acc);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const __m512 factor = _mm512_loadu_ps(run.tile + t * run.tile_bytes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[t][r] = _mm512_mul_ps(acc[t][r], factor);
    }
  }
  StoreTiles<kFormat, R, T>(run, acc);
}

}  // namespace turbomind::TM_ISA
