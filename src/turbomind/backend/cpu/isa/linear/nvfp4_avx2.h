#pragma once

// Computes y tile = tile · panelᵀ for NVFP4 with AVX2 and FMA, in halves of 8 outputs. The sums and
// their order are those of nvfp4_scalar.h, so the bits are the same. Codes are looked up as
// 2 * E2M1 + 12, and the offsets of the panel subtract 12 times the sums of the activations.
//
// Beside what kQ4_0 takes (linear_avx2.h), a step of 8 outputs takes 8 vpshufb for all rows, and 2
// vpmaddwd and 4 more instructions for each row, because the 16 columns of a scale have sums of
// their own.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/k_quants_avx2.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx2.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

template <int R>
inline constexpr int kNvTilesAtOnce = 1;

// Looks up nibbles: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, times 2, plus 12.
TM_HD __m256i LookUpNv(__m256i nibbles) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm256_shuffle_epi8(table, nibbles);
}

// Four columns of 8 outputs, and those 16 columns later.
struct NvCodes {
  __m256i low;
  __m256i high;
};

TM_HD NvCodes LoadNvCodes(const uint8_t* w) {
  const __m256i pairs = LoadCodes(w);
  const __m256i mask = _mm256_set1_epi8(0x0f);
  return {LookUpNv(_mm256_and_si256(pairs, mask)),
          LookUpNv(_mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask))};
}

// Returns the scales of 8 outputs, divided by 256.
TM_HD __m256 LoadNvScale8(const uint8_t* scales) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(Load8(scales)), 7));
}

TM_HD KScales LoadNvScales(const uint8_t* step, int half) {
  return {LoadNvScale8(step + 8 * half), LoadNvScale8(step + kTileRows + 8 * half)};
}

// Returns Σ (2 * E2M1 + 12) * activation over 16 columns for one row. The sums of pairs stay within
// 4 * 2 * 24 * 127 < 2^15.
TM_HD __m256i DotNv(const __m256i (&codes)[4], const uint8_t* a) {
  __m256i high = _mm256_maddubs_epi16(codes[0], Broadcast32(a));
  __m256i low = _mm256_maddubs_epi16(codes[0], Broadcast32(a + kQuantBlock));
#pragma GCC unroll 4
  for (int g = 1; g < 4; ++g) {
    AddBytes(high, codes[g], a + 4 * g);
    AddBytes(low, codes[g], a + kQuantBlock + 4 * g);
  }
  return JoinHalves(high, low);
}

// Adds the step at `w` for all rows: 8 outputs. The panel is that of kQ6_K, so AddScaled is too.
template <int R>
TM_HD void AddNvStep(const uint8_t* w, int half, const uint8_t* a, __m256 (&acc)[R]) {
  __m256i first[4];
  __m256i second[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const NvCodes codes = LoadNvCodes(w + kNvCodesAt + 32 * half + 64 * g);
    first[g] = codes.low;
    second[g] = codes.high;
  }
  __m256i sum[R];
  __m256i other[R];
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
    sum[r] = DotNv(first, a + r * kQuantRowBytes);
    other[r] = DotNv(second, a + r * kQuantRowBytes + kNvGroup);
  }
  const KScales own = LoadNvScales(w, half);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    acc[r] = AddScaled<MatrixFormat::kQ6_K, R>(sum[r], other[r], own,
                                               a + R * kQuantRowBytes + 4 * r, acc[r]);
  }
}

TM_HD void StoreNvHalf(const TileRun& run, int row, int half, __m256 acc) {
  const __m256 factor = _mm256_loadu_ps(reinterpret_cast<const float*>(run.tile + 32 * half));
  StoreHalf(run, row, half, _mm256_mul_ps(acc, factor));
}

// Multiplies all R rows with 8 outputs.
template <int R>
void MultiplyNvHalf(const TileRun& run, int half) {
  __m256 acc[R];
  for (int r = 0; r < R; ++r) {
    acc[r] = _mm256_setzero_ps();
  }
  const uint8_t* w = run.tile + kNvHeaderBytes;
  const uint8_t* a = run.panel;
#pragma GCC unroll 1
  for (int64_t s = 0; s < run.steps; ++s) {
    PrefetchNext<MatrixFormat::kNvfp4, 2>(run, s, half);
    AddNvStep<R>(w, half, a, acc);
    w += TileStepBytes(MatrixFormat::kNvfp4);
    a += PanelStepBytes(MatrixFormat::kNvfp4, R);
  }
  for (int r = 0; r < R; ++r) {
    StoreNvHalf(run, r, half, acc[r]);
  }
}

// Computes the sums of one row for both halves, [half][columns of a scale]. Its broadcasts serve
// both halves.
TM_HD void DotNvRow(const uint8_t* w, const uint8_t* a, __m256i (&sum)[2][2]) {
  __m256i high[2][2] = {};
  __m256i low[2][2] = {};
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const uint8_t* x = a + 4 * g;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const NvCodes codes = LoadNvCodes(w + 64 * g + 32 * half);
      AddBytes(high[half][0], codes.low, x);
      AddBytes(low[half][0], codes.low, x + kQuantBlock);
      AddBytes(high[half][1], codes.high, x + kNvGroup);
      AddBytes(low[half][1], codes.high, x + kQuantBlock + kNvGroup);
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    sum[half][0] = JoinHalves(high[half][0], low[half][0]);
    sum[half][1] = JoinHalves(high[half][1], low[half][1]);
  }
}

// Multiplies one row with both halves together.
inline void MultiplyNvRow(const TileRun& run) {
  __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  const uint8_t* w = run.tile + kNvHeaderBytes;
  const uint8_t* a = run.panel;
#pragma GCC unroll 1
  for (int64_t s = 0; s < run.steps; ++s) {
    __m256i sum[2][2];
    PrefetchNext<MatrixFormat::kNvfp4, 1>(run, s, 0);
    DotNvRow(w + kNvCodesAt, a, sum);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      acc[half] = AddScaled<MatrixFormat::kQ6_K, 1>(
          sum[half][0], sum[half][1], LoadNvScales(w, half), a + kQuantRowBytes, acc[half]);
    }
    w += TileStepBytes(MatrixFormat::kNvfp4);
    a += PanelStepBytes(MatrixFormat::kNvfp4, 1);
  }
  StoreNvHalf(run, 0, 0, acc[0]);
  StoreNvHalf(run, 0, 1, acc[1]);
}

template <int R, int T>
void MultiplyNvTiles(const TileRun& run) {
  static_assert(T == 1);
  if constexpr (R == 1) {
    MultiplyNvRow(run);
  } else {
    MultiplyNvHalf<R>(run, 0);
    MultiplyNvHalf<R>(run, 1);
  }
}

}  // namespace turbomind::TM_ISA
