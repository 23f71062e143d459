#pragma once

// Dot products of neighboring lanes.

#include <bit>
#include <cmath>

#include "cpu_shim/registers.h"

namespace turbomind {
namespace cpu_shim {

// Replaces a subnormal number by zero.
inline float Flush(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

// Returns the FP32 value of BF16 bits. Subnormal numbers count as zero.
inline float FromBf16(uint16_t bits) { return Flush(std::bit_cast<float>(uint32_t{bits} << 16)); }

// Returns a * b + c with one rounding; subnormal operands and results are zero.
inline float FlushingFma(float a, float b, float c) { return Flush(std::fma(a, b, Flush(c))); }

// Returns the products of pairs of int16 in each dword, added.
inline __m256i DotEvenBytes(__m256i unsigned_bytes, __m256i bytes) {
  const __m256i x = _mm256_and_si256(unsigned_bytes, _mm256_set1_epi16(0xff));
  return _mm256_madd_epi16(x, _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8));
}
inline __m256i DotOddBytes(__m256i unsigned_bytes, __m256i bytes) {
  return _mm256_madd_epi16(_mm256_srli_epi16(unsigned_bytes, 8), _mm256_srai_epi16(bytes, 8));
}

}  // namespace cpu_shim

// Adds four products of unsigned bytes of a and bytes of b to each dword, without saturation.
[[gnu::noinline]] inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  return cpu_shim::TwiceInt(
      [](__m256i s, __m256i x, __m256i y) {
        const __m256i dot =
            _mm256_add_epi32(cpu_shim::DotEvenBytes(x, y), cpu_shim::DotOddBytes(x, y));
        return _mm256_add_epi32(s, dot);
      },
      sum, a, b);
}

// Adds two products of int16 to each dword.
[[gnu::noinline]] inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  return cpu_shim::TwiceInt(
      [](__m256i s, __m256i x, __m256i y) { return _mm256_add_epi32(s, _mm256_madd_epi16(x, y)); },
      sum, a, b);
}

[[gnu::noinline]] inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); }, a, b);
}

// Adds the product of the odd BF16 numbers to each FP32 number, then that of the even ones.
[[gnu::noinline]] inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const auto s = cpu_shim::Split<float>(sum);
  const auto x = cpu_shim::Split<uint16_t>(a);
  const auto y = cpu_shim::Split<uint16_t>(b);
  return cpu_shim::Fill<float>([&](int i) {
    const int even = 2 * i;
    const int odd = even + 1;
    const auto add = [&](int k, float to) {
      return cpu_shim::FlushingFma(cpu_shim::FromBf16(x.of[k]), cpu_shim::FromBf16(y.of[k]), to);
    };
    return add(even, add(odd, s.of[i]));
  });
}

}  // namespace turbomind
