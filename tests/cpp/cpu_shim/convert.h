#pragma once

// Conversions between types of lanes.

#include <bit>

#include "cpu_shim/registers.h"

namespace turbomind {
namespace cpu_shim {

// Returns the lanes of `From`, which fill the lower part of a register, as lanes of `To`.
template <class From, class To, class Register>
inline __m512i Widen(const Register& x) {
  static_assert(sizeof(x) * sizeof(To) == sizeof(From) * kRegisterBytes);
  From from[Lanes<To>::kCount];
  __builtin_memcpy(from, &x, sizeof(from));
  return Fill<To>([&](int i) { return from[i]; });
}

// Returns the lower bits of the lanes of `From`, as lanes of `To` in a smaller register.
template <class From, class To, class Register>
inline Register Narrow(__m512i x) {
  static_assert(sizeof(Register) == Lanes<From>::kCount * sizeof(To));
  const Lanes<From> from = Split<From>(x);
  To to[Lanes<From>::kCount];
  for (int i = 0; i < Lanes<From>::kCount; ++i) {
    to[i] = static_cast<To>(from.of[i]);
  }
  return __builtin_bit_cast(Register, to);
}

// Returns the BF16 bits of x, rounded to nearest even. Subnormal numbers become zero, and NaN is
// quiet.
inline uint16_t ToBf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x00800000u) {
    return static_cast<uint16_t>(bits >> 16 & 0x8000u);
  }
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(bits >> 16 | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

}  // namespace cpu_shim

[[gnu::noinline]] inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return cpu_shim::TwiceFloat([](__m256 x) { return _mm256_cvtepi32_ps(_mm256_castps_si256(x)); },
                              a);
}
[[gnu::noinline]] inline __m512 _mm512_maskz_cvtepi32_ps(__mmask16 mask, __m512i a) {
  return cpu_shim::Keep<float>(mask, _mm512_cvtepi32_ps(a));
}
// Rounds to nearest even; what does not fit becomes 0x80000000.
[[gnu::noinline]] inline __m512i _mm512_cvtps_epi32(__m512 a) {
  return cpu_shim::TwiceInt([](__m256i x) { return _mm256_cvtps_epi32(_mm256_castsi256_ps(x)); },
                            a);
}
[[gnu::noinline]] inline __m512i _mm512_maskz_cvtps_epi32(__mmask16 mask, __m512 a) {
  return cpu_shim::Keep<int32_t>(mask, _mm512_cvtps_epi32(a));
}
[[gnu::noinline]] inline __m512i _mm512_cvttps_epi32(__m512 a) {
  return cpu_shim::TwiceInt([](__m256i x) { return _mm256_cvttps_epi32(_mm256_castsi256_ps(x)); },
                            a);
}
[[gnu::noinline]] inline __m512 _mm512_cvtph_ps(__m256i a) {
  const cpu_shim::FloatHalves out = {{_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                                      _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}};
  return __builtin_bit_cast(__m512, out);
}
[[gnu::noinline]] inline __m512 _mm512_maskz_cvtph_ps(__mmask16 mask, __m256i a) {
  return cpu_shim::Keep<float>(mask, _mm512_cvtph_ps(a));
}
[[gnu::noinline]] inline __m256i _mm512_cvtps_ph(__m512 a, int rounding) {
  cpu_shim::Require(rounding == _MM_FROUND_TO_NEAREST_INT,
                    "this rounding to FP16 is missing in tests/cpp/cpu_shim");
  const auto x = __builtin_bit_cast(cpu_shim::FloatHalves, a);
  return _mm256_set_m128i(_mm256_cvtps_ph(x.half[1], _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(x.half[0], _MM_FROUND_TO_NEAREST_INT));
}
// Rounds the lanes of b, then those of a, to BF16.
[[gnu::noinline]] inline __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  const auto upper = cpu_shim::Split<float>(a);
  const auto lower = cpu_shim::Split<float>(b);
  return (__m512bh)cpu_shim::Fill<uint16_t>(
      [&](int i) { return cpu_shim::ToBf16(i < 16 ? lower.of[i] : upper.of[i - 16]); });
}
inline float _mm512_cvtss_f32(__m512 a) { return cpu_shim::Split<float>(a).of[0]; }

[[gnu::noinline]] inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return cpu_shim::Widen<uint8_t, int32_t>(a);
}
[[gnu::noinline]] inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return cpu_shim::Widen<int8_t, int32_t>(a);
}
[[gnu::noinline]] inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return cpu_shim::Widen<uint16_t, int32_t>(a);
}
[[gnu::noinline]] inline __m512i _mm512_cvtepi16_epi32(__m256i a) {
  return cpu_shim::Widen<int16_t, int32_t>(a);
}
[[gnu::noinline]] inline __m512i _mm512_cvtepu8_epi16(__m256i a) {
  return cpu_shim::Widen<uint8_t, int16_t>(a);
}
[[gnu::noinline]] inline __m512i _mm512_cvtepi8_epi16(__m256i a) {
  return cpu_shim::Widen<int8_t, int16_t>(a);
}
[[gnu::noinline]] inline __m512i _mm512_maskz_cvtepu8_epi32(__mmask16 mask, __m128i a) {
  return cpu_shim::Keep<int32_t>(mask, _mm512_cvtepu8_epi32(a));
}
[[gnu::noinline]] inline __m512i _mm512_maskz_cvtepu16_epi32(__mmask16 mask, __m256i a) {
  return cpu_shim::Keep<int32_t>(mask, _mm512_cvtepu16_epi32(a));
}
[[gnu::noinline]] inline __m512i _mm512_maskz_cvtepi8_epi32(__mmask16 mask, __m128i a) {
  return cpu_shim::Keep<int32_t>(mask, _mm512_cvtepi8_epi32(a));
}
[[gnu::noinline]] inline __m512i _mm512_maskz_cvtepi16_epi32(__mmask16 mask, __m256i a) {
  return cpu_shim::Keep<int32_t>(mask, _mm512_cvtepi16_epi32(a));
}

[[gnu::noinline]] inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return cpu_shim::Narrow<uint32_t, uint8_t, __m128i>(a);
}
[[gnu::noinline]] inline __m128i _mm512_maskz_cvtepi32_epi8(__mmask16 mask, __m512i a) {
  return _mm512_cvtepi32_epi8(cpu_shim::Keep<uint32_t>(mask, a));
}
[[gnu::noinline]] inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return cpu_shim::Narrow<uint32_t, uint16_t, __m256i>(a);
}
[[gnu::noinline]] inline __m256i _mm512_cvtepi16_epi8(__m512i a) {
  return cpu_shim::Narrow<uint16_t, uint8_t, __m256i>(a);
}
// The upper half of the result is zero.
[[gnu::noinline]] inline __m128i _mm512_cvtepi64_epi8(__m512i a) {
  const auto from = cpu_shim::Split<uint64_t>(a);
  uint8_t to[16] = {};
  for (int i = 0; i < 8; ++i) {
    to[i] = static_cast<uint8_t>(from.of[i]);
  }
  return __builtin_bit_cast(__m128i, to);
}

// Saturating conversions of two registers, in each run of 128 bits.
[[gnu::noinline]] inline __m512i _mm512_packs_epi32(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_packs_epi32(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_packus_epi32(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_packus_epi32(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_packs_epi16(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_packs_epi16(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_packus_epi16(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_packus_epi16(x, y); }, a, b);
}

}  // namespace turbomind
