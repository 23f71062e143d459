#pragma once

// y tile = tile · panelᵀ with AVX2 and FMA, in halves of 8 outputs and up to 4 rows at a time. The
// same sums in the same order as linear_avx512.h, so the same bits.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

template <int R>
inline constexpr int kTilesAtOnce = 1;

inline constexpr int kHalfRows = 8;

TM_HD __m256i Broadcast32(const uint8_t* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return _mm256_set1_epi32(bits);
}

TM_HD __m256 BroadcastFloat(const uint8_t* p) {
  float value;
  __builtin_memcpy(&value, p, sizeof(value));
  return _mm256_set1_ps(value);
}

TM_HD __m256 LoadHalf8(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

TM_HD __m256i LoadCodes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Σ code * half of one block, 8 outputs, one row, one half of the activations.
template <MatrixFormat F>
TM_HD __m256i DotHalf(const uint8_t* w, const uint8_t* a) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (F == MatrixFormat::kQ8_0) {
    // Signed codes: |w| * sign(a, w), whose pairs stay within 2 * 128 * 127 < 2^15.
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __m256i codes = _mm256_xor_si256(LoadCodes(w + 64 * g), flip);
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes),
                                                 _mm256_sign_epi8(Broadcast32(a + 4 * g), codes));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return sum;
  } else {
    // 8 groups of pairs within 8 * 2 * 15 * 127 < 2^15: 16-bit sums are exact.
    const __m256i mask = _mm256_set1_epi8(0x0f);
    __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const __m256i codes = LoadCodes(w + 64 * g);
      const __m256i low = _mm256_and_si256(codes, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask);
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(low, Broadcast32(a + 4 * g)));
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(high, Broadcast32(a + 16 + 4 * g)));
    }
    return _mm256_madd_epi16(pairs, ones);
  }
}

// Σ code * activation of one block, 8 outputs, one row; the zero point taken off.
template <MatrixFormat F>
TM_HD __m256i DotBlock(const uint8_t* w, const uint8_t* a, const uint8_t* offset) {
  const __m256i sum =
      _mm256_add_epi32(_mm256_slli_epi32(DotHalf<F>(w, a), 8), DotHalf<F>(w, a + kQuantBlock));
  return F == MatrixFormat::kQ4_0 ? _mm256_add_epi32(sum, Broadcast32(offset)) : sum;
}

// BF16 pairs → the odd and the even element as floats. The odd one is added first: the order of
// vdpbf16ps.
TM_HD __m256 OddBF16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
TM_HD __m256 EvenBF16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

// Rows [row, row + N) of a panel of R rows, 8 outputs: half 0 or 1 of the step at `w`.
template <MatrixFormat F, int R, int N>
TM_HD void AddStep(const uint8_t* w, int half, const uint8_t* a, int row, __m256 (&acc)[N]) {
  const uint8_t* meta = w + 16 * half;
  w += TileMetaBytes(F) + 32 * half;
  if constexpr (F == MatrixFormat::kF32) {
    const __m256 column = _mm256_loadu_ps(reinterpret_cast<const float*>(w));
    for (int n = 0; n < N; ++n) {
      acc[n] = _mm256_fmadd_ps(column, BroadcastFloat(a + 4 * (row + n)), acc[n]);
    }
  } else if constexpr (F == MatrixFormat::kBF16) {
    const __m256i columns = LoadCodes(w);
    const __m256 odd = OddBF16(columns);
    const __m256 even = EvenBF16(columns);
    for (int n = 0; n < N; ++n) {
      const __m256i x = Broadcast32(a + 4 * (row + n));
      acc[n] = _mm256_fmadd_ps(even, EvenBF16(x), _mm256_fmadd_ps(odd, OddBF16(x), acc[n]));
    }
  } else {
    const uint8_t* scales = a + R * kQuantRowBytes;
    const uint8_t* offsets = scales + R * 4;
    const __m256 d = LoadHalf8(meta);
    for (int n = 0; n < N; ++n) {
      const int r = row + n;
      const __m256i sum = DotBlock<F>(w, a + r * kQuantRowBytes, offsets + 4 * r);
      acc[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum),
                               _mm256_mul_ps(d, BroadcastFloat(scales + 4 * r)), acc[n]);
      if constexpr (F == MatrixFormat::kQ4_1) {
        acc[n] = _mm256_fmadd_ps(LoadHalf8(meta + 32), BroadcastFloat(offsets + 4 * r), acc[n]);
      }
    }
  }
}

TM_HD void StoreHalf(const TileRun& run, int row, int half, __m256 acc) {
  float lanes[kHalfRows];
  _mm256_storeu_ps(lanes, acc);
  for (int64_t i = 0; i < kHalfRows; ++i) {
    const int64_t output = half * kHalfRows + i;
    if (output < run.num_outputs) {
      float* y = run.y + row * run.y_stride + output;
      const float out = run.bias != nullptr ? lanes[i] + run.bias[output] : lanes[i];
      *y = run.accumulate ? out + *y : out;
    }
  }
}

template <MatrixFormat F, int R, int N>
void MultiplyHalf(const TileRun& run, int row, int half) {
  __m256 acc[N];
  for (int n = 0; n < N; ++n) {
    acc[n] = _mm256_setzero_ps();
  }
  for (int64_t s = 0; s < run.steps; ++s) {
    AddStep<F, R, N>(run.tile + s * TileStepBytes(F), half, run.panel + s * PanelStepBytes(F, R),
                     row, acc);
  }
  for (int n = 0; n < N; ++n) {
    StoreHalf(run, row + n, half, acc[n]);
  }
}

template <MatrixFormat F, int R, int T>
void MultiplyTiles(const TileRun& run) {
  static_assert(T == 1);
  constexpr int kRows = 4;
  for (int half = 0; half < 2; ++half) {
    int row = 0;
    for (; row + kRows <= R; row += kRows) {
      MultiplyHalf<F, R, kRows>(run, row, half);
    }
    for (; row < R; ++row) {
      MultiplyHalf<F, R, 1>(run, row, half);
    }
  }
}

}  // namespace turbomind::TM_ISA
