#pragma once

// Arithmetic, logic, shifts and comparisons of integer lanes. Arithmetic wraps.

#include <algorithm>

#include "cpu_shim/registers.h"

namespace turbomind {

[[gnu::noinline]] inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return cpu_shim::Map<uint32_t>([](uint32_t x, uint32_t y) { return x + y; }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return cpu_shim::Map<uint32_t>([](uint32_t x, uint32_t y) { return x - y; }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  return cpu_shim::Map<uint32_t>([](uint32_t x, uint32_t y) { return x * y; }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_mulhrs_epi16(__m512i a, __m512i b) {
  return cpu_shim::Map<int16_t>([](int x, int y) { return (x * y + 0x4000) >> 15; }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_sub_epi16(__m512i a, __m512i b) {
  return cpu_shim::Map<uint16_t>([](int x, int y) { return x - y; }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_add_epi8(__m512i a, __m512i b) {
  return cpu_shim::Map<uint8_t>([](int x, int y) { return x + y; }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  return cpu_shim::Map<uint8_t>([](int x, int y) { return x - y; }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_max_epi32(__m512i a, __m512i b) {
  return cpu_shim::Map<int32_t>([](int32_t x, int32_t y) { return std::max(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_min_epi32(__m512i a, __m512i b) {
  return cpu_shim::Map<int32_t>([](int32_t x, int32_t y) { return std::min(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_abs_epi32(__m512i a) {
  return cpu_shim::Map<uint32_t>([](uint32_t x) { return x >> 31 != 0 ? 0 - x : x; }, a);
}
[[gnu::noinline]] inline __m512i _mm512_abs_epi8(__m512i a) {
  return cpu_shim::Map<int8_t>([](int x) { return x < 0 ? -x : x; }, a);
}

inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i _mm512_andnot_si512(__m512i a, __m512i b) { return ~a & b; }
[[gnu::noinline]] inline __m512i _mm512_mask_or_epi32(__m512i from, __mmask16 mask, __m512i a,
                                                      __m512i b) {
  return cpu_shim::Blend<uint32_t>(mask, from, a | b);
}
// Looks up each bit in `table`, at 4 times the bit of a, 2 times that of b and that of c.
[[gnu::noinline]] inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c,
                                                           int table) {
  __m512i out = a ^ a;
  for (int i = 0; i < 8; ++i) {
    if ((table >> i & 1) != 0) {
      out |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
    }
  }
  return out;
}

// Shifts of all lanes by one count. A count of the lane's width or more shifts everything out.
[[gnu::noinline]] inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return cpu_shim::Map<uint32_t>([&](uint32_t x) { return count < 32 ? x << count : 0; }, a);
}
[[gnu::noinline]] inline __m512i _mm512_srli_epi32(__m512i a, unsigned count) {
  return cpu_shim::Map<uint32_t>([&](uint32_t x) { return count < 32 ? x >> count : 0; }, a);
}
[[gnu::noinline]] inline __m512i _mm512_srai_epi32(__m512i a, unsigned count) {
  return cpu_shim::Map<int32_t>([&](int32_t x) { return x >> std::min(count, 31u); }, a);
}
[[gnu::noinline]] inline __m512i _mm512_slli_epi16(__m512i a, unsigned count) {
  return cpu_shim::Map<uint16_t>([&](unsigned x) { return count < 16 ? x << count : 0; }, a);
}
[[gnu::noinline]] inline __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  return cpu_shim::Map<uint16_t>([&](unsigned x) { return count < 16 ? x >> count : 0; }, a);
}
[[gnu::noinline]] inline __m512i _mm512_srai_epi16(__m512i a, unsigned count) {
  return cpu_shim::Map<int16_t>([&](int x) { return x >> std::min(count, 15u); }, a);
}
[[gnu::noinline]] inline __m512i _mm512_srli_epi64(__m512i a, unsigned count) {
  return cpu_shim::Map<uint64_t>([&](uint64_t x) { return count < 64 ? x >> count : 0; }, a);
}
[[gnu::noinline]] inline __m512i _mm512_maskz_slli_epi32(__mmask16 mask, __m512i a,
                                                         unsigned count) {
  return cpu_shim::Keep<uint32_t>(mask, _mm512_slli_epi32(a, count));
}

// Shifts with a count for each lane.
[[gnu::noinline]] inline __m512i _mm512_srlv_epi32(__m512i a, __m512i counts) {
  return cpu_shim::Map<uint32_t>([](uint32_t x, uint32_t n) { return n < 32 ? x >> n : 0; }, a,
                                 counts);
}
[[gnu::noinline]] inline __m512i _mm512_sllv_epi32(__m512i a, __m512i counts) {
  return cpu_shim::Map<uint32_t>([](uint32_t x, uint32_t n) { return n < 32 ? x << n : 0; }, a,
                                 counts);
}

[[gnu::noinline]] inline __mmask16 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(
      cpu_shim::MaskOf<int32_t>([](int32_t x, int32_t y) { return x == y; }, a, b));
}
[[gnu::noinline]] inline __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(
      cpu_shim::MaskOf<int32_t>([](int32_t x, int32_t y) { return x < y; }, a, b));
}
[[gnu::noinline]] inline __mmask16 _mm_testn_epi8_mask(__m128i a, __m128i b) {
  return static_cast<__mmask16>(
      _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(a, b), _mm_setzero_si128())));
}

[[gnu::noinline]] inline int32_t _mm512_reduce_add_epi32(__m512i a) {
  uint32_t sum = 0;
  for (const uint32_t x : cpu_shim::Split<uint32_t>(a).of) {
    sum += x;
  }
  return static_cast<int32_t>(sum);
}
[[gnu::noinline]] inline int32_t _mm512_reduce_max_epi32(__m512i a) {
  const auto lanes = cpu_shim::Split<int32_t>(a);
  return *std::max_element(lanes.of, lanes.of + lanes.kCount);
}

}  // namespace turbomind
