#pragma once

// The operations of simd.h with AVX2, FMA and F16C, in two registers of eight lanes.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

struct F32x16 {
  __m256 a, b;
};
struct I32x16 {
  __m256i a, b;
};
struct Mask16 {
  __m256i a, b;  // all ones or all zeros
};
struct Table16 {
  __m256 a, b;
};

TM_HD F32x16 Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TM_HD F32x16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TM_HD void Store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
TM_HD F32x16 Add(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TM_HD F32x16 Sub(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TM_HD F32x16 Mul(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TM_HD F32x16 Div(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
// Returns x * y + z, rounded once.
TM_HD F32x16 Fma(F32x16 x, F32x16 y, F32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// Returns x > y ? x : y, which is y if either is NaN.
TM_HD F32x16 Max(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
// Returns x < y ? x : y, which is y if either is NaN.
TM_HD F32x16 Min(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
// Keeps the compiler from sinking the computation of x below this line.
TM_HD void KeepOrder(F32x16& x) { asm("" : "+x"(x.a), "+x"(x.b)); }
TM_HD float First(F32x16 x) { return _mm256_cvtss_f32(x.a); }

TM_HD I32x16 Set1Int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TM_HD I32x16 LoadInt(const void* p) {
  const __m256i* from = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
TM_HD void StoreInt(void* p, I32x16 x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}
TM_HD I32x16 Bits(F32x16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
TM_HD F32x16 FromBits(I32x16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
TM_HD F32x16 ToFloat(I32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// Rounds to the nearest integer, ties to even. Returns 0x80000000 if it does not fit.
TM_HD I32x16 ToInt(F32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
TM_HD I32x16 Add(I32x16 x, I32x16 y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
TM_HD I32x16 Sub(I32x16 x, I32x16 y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
TM_HD I32x16 And(I32x16 x, I32x16 y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
TM_HD I32x16 Or(I32x16 x, I32x16 y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
TM_HD I32x16 Xor(I32x16 x, I32x16 y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
TM_HD I32x16 MaxInt(I32x16 x, I32x16 y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
TM_HD I32x16 MinInt(I32x16 x, I32x16 y) {
  return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)};
}
template <int N>
TM_HD I32x16 ShiftLeft(I32x16 x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
// Shifts in zeros.
template <int N>
TM_HD I32x16 ShiftRight(I32x16 x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
TM_HD I32x16 ShiftRight(I32x16 x, I32x16 counts) {
  return {_mm256_srlv_epi32(x.a, counts.a), _mm256_srlv_epi32(x.b, counts.b)};
}

TM_HD Mask16 Less(F32x16 x, F32x16 y) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
TM_HD Mask16 Equal(I32x16 x, I32x16 y) {
  return {_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b)};
}
// Compares signed integers.
TM_HD Mask16 Less(I32x16 x, I32x16 y) {
  return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)};
}
// Returns the mask of the lanes lo <= lane < hi.
TM_HD Mask16 LaneRange(int lo, int hi) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  const __m256i low = _mm256_set1_epi32(lo);
  const __m256i high = _mm256_set1_epi32(hi);
  return {_mm256_andnot_si256(_mm256_cmpgt_epi32(low, first), _mm256_cmpgt_epi32(high, first)),
          _mm256_andnot_si256(_mm256_cmpgt_epi32(low, second), _mm256_cmpgt_epi32(high, second))};
}
// Returns lane i as bit i.
TM_HD unsigned MaskBits(Mask16 m) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(m.a))) |
         static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(m.b))) << 8;
}
TM_HD int Count(Mask16 m) { return __builtin_popcount(MaskBits(m)); }
TM_HD F32x16 Select(Mask16 m, F32x16 x, F32x16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b))};
}
TM_HD I32x16 Select(Mask16 m, I32x16 x, I32x16 y) {
  return {_mm256_blendv_epi8(y.a, x.a, m.a), _mm256_blendv_epi8(y.b, x.b, m.b)};
}

// Reduces by halves: ((i + i+8) + (i+4 + i+12)) and so on, until one lane is left.
TM_HD float ReduceAdd(F32x16 x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
TM_HD float ReduceMax(F32x16 x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
TM_HD float ReduceMin(F32x16 x) {
  const __m256 h = _mm256_min_ps(x.a, x.b);
  const __m128 q = _mm_min_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_min_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_min_ss(d, _mm_shuffle_ps(d, d, 1)));
}

// Returns lane i ^ kDistance in lane i. REQUIRES: kDistance is a power of two below 16.
template <int kDistance>
TM_HD F32x16 SwapLanes(F32x16 x) {
  switch (kDistance) {
    case 1:
      return {_mm256_permute_ps(x.a, _MM_SHUFFLE(2, 3, 0, 1)),
              _mm256_permute_ps(x.b, _MM_SHUFFLE(2, 3, 0, 1))};
    case 2:
      return {_mm256_permute_ps(x.a, _MM_SHUFFLE(1, 0, 3, 2)),
              _mm256_permute_ps(x.b, _MM_SHUFFLE(1, 0, 3, 2))};
    case 4:
      return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    default:
      return {x.b, x.a};
  }
}
// Moves lane k to lane 2k and lane 8 + k to lane 2k + 1. Deinterleave is the inverse.
TM_HD F32x16 Interleave(F32x16 x) {
  const __m256 low = _mm256_unpacklo_ps(x.a, x.b);
  const __m256 high = _mm256_unpackhi_ps(x.a, x.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
TM_HD F32x16 Deinterleave(F32x16 x) {
  const auto ordered = [](__m256 mixed) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
  };
  return {ordered(_mm256_shuffle_ps(x.a, x.b, _MM_SHUFFLE(2, 0, 2, 0))),
          ordered(_mm256_shuffle_ps(x.a, x.b, _MM_SHUFFLE(3, 1, 3, 1)))};
}

TM_HD I32x16 LoadBytes(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
// Returns the low 16 bits of each lane, in order.
TM_HD __m256i PackShorts(I32x16 x) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i mixed =
      _mm256_packus_epi32(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
  return _mm256_permute4x64_epi64(mixed, 0xd8);
}
TM_HD void StoreBytes(void* p, I32x16 x) {
  const __m256i shorts = _mm256_and_si256(PackShorts(x), _mm256_set1_epi16(0xff));
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
  _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
}
TM_HD I32x16 LoadShorts(const void* p) {
  const __m128i* from = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(from)),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))};
}
TM_HD void StoreShorts(void* p, I32x16 x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), PackShorts(x));
}
// Stores 16 codes below 16 as 8 bytes, with code 2i in the low nibble of byte i.
TM_HD void StoreNibbles(void* p, I32x16 codes) {
  const __m256i shorts = PackShorts(codes);
  const __m256i pairs = _mm256_madd_epi16(shorts, _mm256_set1_epi32(0x00100001));
  const __m256i narrow = _mm256_packus_epi32(pairs, pairs);
  const __m128i both =
      _mm_unpacklo_epi64(_mm256_castsi256_si128(narrow), _mm256_extracti128_si256(narrow, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(both, both));
}
// Converts the low 16 bits of each lane from FP16.
TM_HD F32x16 HalfToFloat(I32x16 x) {
  const __m256i shorts = PackShorts(x);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(shorts)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(shorts, 1))};
}
TM_HD F32x16 LoadHalf(const void* p) {
  const __m128i* from = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
// Returns the bits of the nearest FP16, ties to even.
TM_HD I32x16 FloatToHalf(F32x16 x) {
  return {_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)),
          _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT))};
}

TM_HD Table16 LoadTable(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
// Returns table[lane & 15] in each lane.
TM_HD F32x16 Lookup(Table16 t, I32x16 index) {
  const auto half = [&](__m256i i) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));  // bit 3 as the sign
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.a, i), _mm256_permutevar8x32_ps(t.b, i),
                            upper);
  };
  return {half(index.a), half(index.b)};
}

struct Table32 {
  Table16 low, high;
};
TM_HD Table32 LoadTable32(const float* p) { return {LoadTable(p), LoadTable(p + 16)}; }
// Returns table[lane & 31] in each lane.
TM_HD F32x16 Lookup(Table32 t, I32x16 index) {
  const I32x16 bit = ShiftLeft<27>(index);  // bit 4 as the sign
  const F32x16 low = Lookup(t.low, index);
  const F32x16 high = Lookup(t.high, index);
  return {_mm256_blendv_ps(low.a, high.a, _mm256_castsi256_ps(bit.a)),
          _mm256_blendv_ps(low.b, high.b, _mm256_castsi256_ps(bit.b))};
}
// Rounds toward zero. Returns 0x80000000 if the result does not fit.
TM_HD I32x16 Truncate(F32x16 x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }

// Repeats eight bytes: even lanes hold the first four, odd lanes the last four.
TM_HD I32x16 Broadcast8(const void* p) {
  int64_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  const __m256i both = _mm256_set1_epi64x(bits);
  return {both, both};
}
// Loads the even or odd ones of 32 dwords.
template <int kOdd>
TM_HD I32x16 LoadEverySecond(const void* p) {
  const float* from = static_cast<const float*>(p);
  const auto half = [&](int i) {
    const __m256 mixed =
        _mm256_shuffle_ps(_mm256_loadu_ps(from + i), _mm256_loadu_ps(from + i + 8),
                          kOdd ? _MM_SHUFFLE(3, 1, 3, 1) : _MM_SHUFFLE(2, 0, 2, 0));
    return _mm256_permute4x64_epi64(_mm256_castps_si256(mixed), 0xd8);
  };
  return {half(0), half(16)};
}
// Loads the dword at p + i * stride into lane i.
TM_HD I32x16 GatherDwords(const void* p, int stride) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i offset = _mm256_mullo_epi32(lane, _mm256_set1_epi32(stride));
  const uint8_t* base = static_cast<const uint8_t*>(p);
  return {_mm256_i32gather_epi32(reinterpret_cast<const int*>(base), offset, 1),
          _mm256_i32gather_epi32(reinterpret_cast<const int*>(base + 8 * stride), offset, 1)};
}

TM_HD void TransposeQuads(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
  const __m256i low01 = _mm256_unpacklo_epi32(a, b);
  const __m256i high01 = _mm256_unpackhi_epi32(a, b);
  const __m256i low23 = _mm256_unpacklo_epi32(c, d);
  const __m256i high23 = _mm256_unpackhi_epi32(c, d);
  a = _mm256_unpacklo_epi64(low01, low23);
  b = _mm256_unpackhi_epi64(low01, low23);
  c = _mm256_unpacklo_epi64(high01, high23);
  d = _mm256_unpackhi_epi64(high01, high23);
}
// Transposes each run of four lanes, a matrix whose row r is in a[r].
TM_HD void TransposeQuads(I32x16 (&a)[4]) {
  TransposeQuads(a[0].a, a[1].a, a[2].a, a[3].a);
  TransposeQuads(a[0].b, a[1].b, a[2].b, a[3].b);
}
// Loads 16 rows of 16 bytes: lane i of out[c] is dword c of row i.
TM_HD void LoadTransposed(const uint8_t* p, int64_t stride, I32x16 (&out)[4]) {
  const auto rows = [&](int i) {  // row i below row i + 4
    const __m128i* low = reinterpret_cast<const __m128i*>(p + i * stride);
    const __m128i* high = reinterpret_cast<const __m128i*>(p + (i + 4) * stride);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)),
                                   _mm_loadu_si128(high), 1);
  };
  for (int r = 0; r < 4; ++r) {
    out[r] = {rows(r), rows(8 + r)};
  }
  TransposeQuads(out);
}

// Lanes as pairs of int16: the low and the high half of a dword.

struct ShortTable {
  __m256i v;  // the values as int8, in both 128-bit lanes
};
TM_HD ShortTable LoadShortTable(const int16_t* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_broadcastsi128_si256(
      _mm_packs_epi16(_mm_loadu_si128(from), _mm_loadu_si128(from + 1)))};
}
// Returns table[half & 15] in each half.
TM_HD I32x16 LookupPairs(ShortTable t, I32x16 index) {
  const auto half = [&](__m256i i) {
    const __m256i code = _mm256_and_si256(i, _mm256_set1_epi16(15));
    const __m256i value = _mm256_shuffle_epi8(t.v, code);
    return _mm256_srai_epi16(_mm256_slli_epi16(value, 8), 8);
  };
  return {half(index.a), half(index.b)};
}
// Lanes are processed in parts, which leaves registers for more sums.
inline constexpr int kParts = 2;
struct Part {
  __m256i v;
};
template <int P>
TM_HD Part PartOf(I32x16 x) {
  return {P == 0 ? x.a : x.b};
}
template <int P>
TM_HD void SetPart(I32x16& x, Part part) {
  (P == 0 ? x.a : x.b) = part.v;
}
// Returns table[nibble K of the half] in each half.
template <int K>
TM_HD Part LookupNibble(ShortTable t, Part words) {
  const __m256i nibbles = K % 2 == 0 ? words.v : _mm256_srli_epi16(words.v, 4);
  // Both bytes are looked up. The unused one belongs to K ^ 2.
  const __m256i values = _mm256_shuffle_epi8(t.v, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
  return {_mm256_srai_epi16(K < 2 ? _mm256_slli_epi16(values, 8) : values, 8)};
}
template <int K>
TM_HD I32x16 LookupNibble(ShortTable t, I32x16 words) {
  return {LookupNibble<K>(t, Part{words.a}).v, LookupNibble<K>(t, Part{words.b}).v};
}
// Returns sum + a.low * b.low + a.high * b.high.
TM_HD Part DotPairs(Part sum, Part x, Part y) {
  Part total = {_mm256_add_epi32(sum.v, _mm256_madd_epi16(x.v, y.v))};
  asm("" : "+x"(total.v));  // else GCC 12 makes a tree of additions and spills its leaves
  return total;
}
TM_HD I32x16 DotPairs(I32x16 sum, I32x16 x, I32x16 y) {
  return {DotPairs(Part{sum.a}, Part{x.a}, Part{y.a}).v,
          DotPairs(Part{sum.b}, Part{x.b}, Part{y.b}).v};
}
// Loads 16 nibbles each from a (low halves) and b (high halves) into the low bits of each half. The
// bits above are undefined.
TM_HD I32x16 LoadNibblePairs(const void* a, const void* b) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const auto eight = [&](int at) {
    int32_t low;
    int32_t high;
    __builtin_memcpy(&low, static_cast<const uint8_t*>(a) + at, sizeof(low));
    __builtin_memcpy(&high, static_cast<const uint8_t*>(b) + at, sizeof(high));
    const __m256i upper = _mm256_srlv_epi32(_mm256_set1_epi32(high), shifts);
    return _mm256_blend_epi16(_mm256_srlv_epi32(_mm256_set1_epi32(low), shifts),
                              _mm256_slli_epi32(upper, 16), 0xaa);
  };
  return {eight(0), eight(4)};
}
// Loads 64 nibbles each from a (low halves) and b (high halves). Lane 4 j + g holds the nibbles
// 16 g + 4 j to 16 g + 4 j + 3 of both.
TM_HD I32x16 LoadNibbleRows(const uint8_t* a, const uint8_t* b) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  const __m256i even = _mm256_unpacklo_epi16(x, y);  // g = 0 below g = 2
  const __m256i odd = _mm256_unpackhi_epi16(x, y);   // g = 1 below g = 3
  return {_mm256_permute4x64_epi64(_mm256_unpacklo_epi32(even, odd), 0xd8),
          _mm256_permute4x64_epi64(_mm256_unpackhi_epi32(even, odd), 0xd8)};
}

// Lanes as four runs of four.

// Loads the dword p[i % 4] into lane i.
TM_HD I32x16 LoadQuad(const void* p) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return {both, both};
}
// Packs each run: the four lanes of a as two pairs of int16, saturated, then those of b.
TM_HD I32x16 PackPairs(I32x16 x, I32x16 y) {
  return {_mm256_packs_epi32(x.a, y.a), _mm256_packs_epi32(x.b, y.b)};
}

}  // namespace turbomind::TM_ISA
