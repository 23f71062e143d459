#pragma once

// MXFP4 with AVX2 and FMA: like mxfp4_avx512.h, but a register holds 2 blocks.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/mxfp4/mxfp4.h"

namespace turbomind::TM_ISA {

inline constexpr int kHalfBytes = kMxStepBytes / 2;  // codes of 2 blocks

TM_HD __m256i LoadBytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// The weights of the 4 outputs in half a step.
struct MxWeights {
  __m256i low[kMxOutputs];  // looked up: 2 * E2M1 + 12
  __m256i high[kMxOutputs];
  __m256 scales;  // lane 4 * block + output
};

TM_HD void LookUp(__m256i codes, int o, MxWeights& w) {
  // 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, times 2, plus 12.
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i mask = _mm256_set1_epi8(0x0f);
  w.low[o] = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask));
  w.high[o] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask));
}

// Converts exponents to powers of two. The same bit makes 0 a subnormal and 255 a NaN.
TM_HD __m256 PowersOfTwo(const uint8_t (&exponents)[8]) {
  const __m256i e =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents)));
  const __m256i ends = _mm256_or_si256(_mm256_cmpeq_epi32(e, _mm256_setzero_si256()),
                                       _mm256_cmpeq_epi32(e, _mm256_set1_epi32(255)));
  return _mm256_castsi256_ps(_mm256_or_si256(
      _mm256_slli_epi32(e, 23), _mm256_and_si256(ends, _mm256_set1_epi32(0x00400000))));
}

// Loads the blocks [first, first + 2) of the outputs' rows. Missing blocks are zero.
template <MatrixFormat F>
TM_HD MxWeights LoadMxWeights(const MxRun& run, int64_t first) {
  MxWeights w;
  uint8_t exponents[8] = {};
  for (int o = 0; o < kMxOutputs; ++o) {
    __m128i codes[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
    for (int i = 0; i < 2; ++i) {
      if (first + i < run.blocks) {
        const uint8_t* block = run.rows[o] + (first + i) * kMxBlockBytes<F>;
        codes[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + kMxCodesAt<F>));
        exponents[4 * i + o] = F == MatrixFormat::kMxfp4 ? block[0] : run.scales[o][first + i];
      }
    }
    LookUp(_mm256_set_m128i(codes[1], codes[0]), o, w);
  }
  w.scales = PowersOfTwo(exponents);
  return w;
}

// Sums of pairs stay within 4 * 24 * 128 < 2^15.
TM_HD __m256i DotHalf(__m256i low, __m256i high, const uint8_t* x_low, const uint8_t* x_high) {
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, LoadBytes(x_low)),
                                         _mm256_maddubs_epi16(high, LoadBytes(x_high)));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

TM_HD __m256 AddHalfStep(const MxWeights& w, const MxPanelRow& x, int half, __m256 acc) {
  const int at = half * kHalfBytes;
  __m256i sum[kMxOutputs];
  for (int o = 0; o < kMxOutputs; ++o) {
    const __m256i upper = DotHalf(w.low[o], w.high[o], x.high[0] + at, x.high[1] + at);
    const __m256i lower = DotHalf(w.low[o], w.high[o], x.low[0] + at, x.low[1] + at);
    sum[o] = _mm256_add_epi32(_mm256_slli_epi32(upper, 8), lower);
  }
  const __m256i dot = _mm256_add_epi32(
      _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3])),
      LoadBytes(x.offsets + at));
  const __m256 d = _mm256_loadu_ps(reinterpret_cast<const float*>(x.scales + at));
  return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), d), w.scales, acc);
}

TM_HD void StoreMxRow(const MxRun& run, int r, __m256 first, __m256 second) {
  float lanes[2 * 8];
  _mm256_storeu_ps(lanes, first);
  _mm256_storeu_ps(lanes + 8, second);
  for (int o = 0; o < run.num_outputs; ++o) {
    const float sum = (lanes[o] + lanes[4 + o]) + (lanes[8 + o] + lanes[12 + o]);
    float* y = run.y + r * run.y_stride + o;
    const float out = run.bias != nullptr ? sum + run.bias[o] : sum;
    *y = run.accumulate ? out + *y : out;
  }
}

template <MatrixFormat F, int R>
void MultiplyMxRows(const MxRun& run) {
  __m256 acc[2][R];
  for (int r = 0; r < R; ++r) {
    acc[0][r] = _mm256_setzero_ps();
    acc[1][r] = _mm256_setzero_ps();
  }
  for (int64_t s = 0; s < MxSteps(run.blocks); ++s) {
    PrefetchStep<F>(run, s);
    for (int half = 0; half < 2; ++half) {
      const MxWeights w = LoadMxWeights<F>(run, s * kMxStepBlocks + 2 * half);
      for (int r = 0; r < R; ++r) {
        acc[half][r] = AddHalfStep(w, MxRowAt(run.panel, s, R, r), half, acc[half][r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    StoreMxRow(run, r, acc[0][r], acc[1][r]);
  }
}

}  // namespace turbomind::TM_ISA
