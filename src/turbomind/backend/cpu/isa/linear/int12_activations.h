#pragma once

// Quantizes activations to codes of 12 bits that share residuals, for weights with two codes of 4
// bits in a byte, q[k] + 16 q[16 + k] for k < 16. For AVX-512 only.
//
// A block of 32 columns has the codes
//   A[k]      = 256 coarse[k] + residual[k]
//   B[16 + k] = 256 coarse[16 + k] + 16 residual[k]
// times one FP32 scale. One product of a residual and a byte of weights thus adds the rest of two
// columns, and the sum over the block is an exact integer:
//   Σ q[k] A[k] + q[16 + k] B[16 + k] = 256 Σ coarse[k] q[k] + Σ residual[k] byte[k]
// The residual modulo 16 is the last digit of B / 16. The rest of the residual is free, so A, too,
// is within 8 units of the activation: half a step of 16. Codes of 8 bits have steps of 256.
// The scale is amax / (119 · 256), so that no coarse code exceeds 127: a residual of -128 adds 2048
// to what the coarse code of B must reach.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

inline constexpr float kMaxInt12Code = 119.f * 256.f;
inline constexpr float kInt12Step = 16.f;

TM_HD void StoreLowBytes(__m512i x, uint8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, x));
}

// Rounds to integers, ties to even.
TM_HD __m512i RoundToInts(__m512 x) { return _mm512_maskz_cvtps_epi32(0xffff, x); }

// Packs one block of 32 columns into kInt12RowBytes: int8 coarse[32], residual[16]. Returns the
// scale; `sum` is the sum of the codes. Zero, tiny and non-finite blocks are like QuantizeBlock's.
TM_HD float QuantizeInt12Block(const float* x, uint8_t* row, int32_t& sum) {
  const BlockRange range = RangeOf(x);
  sum = 0;
  if (range.is_zero()) {
    __builtin_memset(row, 0, kInt12RowBytes);
    return range.zero_scale();
  }
  const __m512 inverse = _mm512_set1_ps(kMaxInt12Code / kInt12Step / range.amax);
  const __m512i second = RoundToInts(_mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));  // B / 16
  const __m512i digit = _mm512_and_si512(second, _mm512_set1_epi32(15));
  const __m512 steps =
      _mm512_fnmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, digit), _mm512_set1_ps(1 / kInt12Step),
                       _mm512_mul_ps(_mm512_loadu_ps(x), inverse));
  const __m512i first = _mm512_add_epi32(_mm512_slli_epi32(RoundToInts(steps), 4), digit);  // A
  const __m512i coarse = _mm512_srai_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(128)), 8);
  const __m512i residual = _mm512_sub_epi32(first, _mm512_slli_epi32(coarse, 8));
  StoreLowBytes(coarse, row);
  StoreLowBytes(_mm512_srai_epi32(_mm512_sub_epi32(second, residual), 4), row + 16);
  StoreLowBytes(residual, row + kQuantBlock);
  sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, _mm512_slli_epi32(second, 4)));
  return range.amax / kMaxInt12Code;
}

}  // namespace turbomind::TM_ISA
