#pragma once

// Arithmetic on FP32 lanes.

#include <algorithm>
#include <cmath>

#include "cpu_shim/registers.h"

namespace turbomind {

inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
[[gnu::noinline]] inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return cpu_shim::TwiceFloat([](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return cpu_shim::TwiceFloat([](__m256 x, __m256 y) { return _mm256_min_ps(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return cpu_shim::TwiceFloat([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); },
                              a, b, c);
}
[[gnu::noinline]] inline __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return cpu_shim::TwiceFloat(
      [](__m256 x, __m256 y, __m256 z) { return _mm256_fnmadd_ps(x, y, z); }, a, b, c);
}
[[gnu::noinline]] inline __m512 _mm512_mask_sub_ps(__m512 from, __mmask16 mask, __m512 a,
                                                   __m512 b) {
  return cpu_shim::Blend<float>(mask, from, a - b);
}

// Compares without signals; NaN compares as false.
[[gnu::noinline]] inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  const auto compare = [&](auto fn) {
    return static_cast<__mmask16>(cpu_shim::MaskOf<float>(fn, a, b));
  };
  switch (predicate) {
    case _CMP_EQ_OQ:
      return compare([](float x, float y) { return x == y; });
    case _CMP_LT_OQ:
      return compare([](float x, float y) { return x < y; });
    case _CMP_LE_OQ:
      return compare([](float x, float y) { return x <= y; });
    case _CMP_GT_OQ:
      return compare([](float x, float y) { return x > y; });
    case _CMP_GE_OQ:
      return compare([](float x, float y) { return x >= y; });
    default:
      cpu_shim::Require(false, "this comparison of floats is missing in tests/cpp/cpu_shim");
      return 0;
  }
}

// Rounds to integers. The upper bits of `how` would keep bits behind the point.
[[gnu::noinline]] inline __m512 _mm512_maskz_roundscale_ps(__mmask16 mask, __m512 a, int how) {
  const auto round = [&](auto fn) {
    return cpu_shim::Keep<float>(mask, cpu_shim::TwiceFloat(fn, a));
  };
  switch (how & ~_MM_FROUND_NO_EXC) {
    case _MM_FROUND_TO_NEAREST_INT:
      return round([](__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT); });
    case _MM_FROUND_TO_NEG_INF:
      return round([](__m256 x) { return _mm256_floor_ps(x); });
    case _MM_FROUND_TO_POS_INF:
      return round([](__m256 x) { return _mm256_ceil_ps(x); });
    default:
      cpu_shim::Require(false, "this rounding is missing in tests/cpp/cpu_shim");
      return a;
  }
}

// Returns x minus the largest integer that is not above it; zero for infinities.
[[gnu::noinline]] inline __m512 _mm512_reduce_ps(__m512 a, int how) {
  cpu_shim::Require((how & ~_MM_FROUND_NO_EXC) == _MM_FROUND_TO_NEG_INF,
                    "this reduction is missing in tests/cpp/cpu_shim");
  return cpu_shim::Map<float>([](float x) { return std::isinf(x) ? -0.f : x - std::floor(x); }, a);
}

// Returns a * 2^floor(b) with one rounding. An infinite b gives infinity or zero, except for the
// products of zero and infinity, which give NaN.
[[gnu::noinline]] inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return cpu_shim::Map<float>(
      [](float x, float y) {
        if (std::isnan(x) || std::isnan(y)) {
          return x + y;
        }
        if (std::isinf(y)) {
          return x * (y > 0.f ? y : 0.f);
        }
        return std::ldexp(x, static_cast<int>(std::clamp(std::floor(y), -1000.f, 1000.f)));
      },
      a, b);
}

}  // namespace turbomind
