#pragma once

// The operations of simd.h with AVX-512 (F, BW, DQ, VL, VBMI, VNNI).

// GCC 12 warns of the intentionally undefined operands in its own header.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd/dot_pairs_avx512.h"
#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};
struct Mask16 {
  __mmask16 v;
};
struct Table16 {
  __m512 v;
};

TM_HD F32x16 Set1(float x) { return {_mm512_set1_ps(x)}; }
TM_HD F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
TM_HD void Store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
TM_HD F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
TM_HD F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TM_HD F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TM_HD F32x16 Div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// Returns a * b + c, rounded once.
TM_HD F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Returns a > b ? a : b, which is b if either is NaN.
TM_HD F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// Returns a < b ? a : b, which is b if either is NaN.
TM_HD F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
TM_HD void KeepOrder(F32x16& /*x*/) {}
TM_HD float First(F32x16 a) { return _mm512_cvtss_f32(a.v); }

TM_HD I32x16 Set1Int(int32_t x) { return {_mm512_set1_epi32(x)}; }
TM_HD I32x16 LoadInt(const void* p) { return {_mm512_loadu_si512(p)}; }
TM_HD void StoreInt(void* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
TM_HD I32x16 Bits(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
TM_HD F32x16 FromBits(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
TM_HD F32x16 ToFloat(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Rounds to the nearest integer, ties to even. Returns 0x80000000 if it does not fit.
TM_HD I32x16 ToInt(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
TM_HD I32x16 Add(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
TM_HD I32x16 Sub(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
TM_HD I32x16 And(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
TM_HD I32x16 Or(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
TM_HD I32x16 Xor(I32x16 a, I32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
TM_HD I32x16 MaxInt(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
TM_HD I32x16 MinInt(I32x16 a, I32x16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
template <int N>
TM_HD I32x16 ShiftLeft(I32x16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
// Shifts in zeros.
template <int N>
TM_HD I32x16 ShiftRight(I32x16 a) {
  return {_mm512_srli_epi32(a.v, N)};
}
TM_HD I32x16 ShiftRight(I32x16 a, I32x16 counts) { return {_mm512_srlv_epi32(a.v, counts.v)}; }

TM_HD Mask16 Less(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
TM_HD Mask16 Equal(I32x16 a, I32x16 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
// Compares signed integers.
TM_HD Mask16 Less(I32x16 a, I32x16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
// Returns the mask of the lanes lo <= lane < hi.
TM_HD Mask16 LaneRange(int lo, int hi) {
  const unsigned from = lo <= 0 ? 0xffffu : lo >= 16 ? 0u : (0xffffu << lo) & 0xffffu;
  const unsigned below = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u;
  return {static_cast<__mmask16>(from & below)};
}
TM_HD int Count(Mask16 m) { return __builtin_popcount(m.v); }
// Returns lane i as bit i.
TM_HD unsigned MaskBits(Mask16 m) { return m.v; }
TM_HD F32x16 Select(Mask16 m, F32x16 a, F32x16 b) { return {_mm512_mask_mov_ps(b.v, m.v, a.v)}; }
TM_HD I32x16 Select(Mask16 m, I32x16 a, I32x16 b) { return {_mm512_mask_mov_epi32(b.v, m.v, a.v)}; }

// Reduces by halves: ((i + i+8) + (i+4 + i+12)) and so on, until one lane is left.
TM_HD float ReduceAdd(F32x16 a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
TM_HD float ReduceMax(F32x16 a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
TM_HD float ReduceMin(F32x16 a) {
  const __m256 h = _mm256_min_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_min_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_min_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_min_ss(d, _mm_shuffle_ps(d, d, 1)));
}

// Returns lane i ^ kDistance in lane i. REQUIRES: kDistance is a power of two below 16.
template <int kDistance>
TM_HD F32x16 SwapLanes(F32x16 a) {
  switch (kDistance) {
    case 1:
      return {_mm512_permute_ps(a.v, _MM_SHUFFLE(2, 3, 0, 1))};
    case 2:
      return {_mm512_permute_ps(a.v, _MM_SHUFFLE(1, 0, 3, 2))};
    case 4:
      return {_mm512_shuffle_f32x4(a.v, a.v, _MM_SHUFFLE(2, 3, 0, 1))};
    default:
      return {_mm512_shuffle_f32x4(a.v, a.v, _MM_SHUFFLE(1, 0, 3, 2))};
  }
}
// Moves lane k to lane 2k and lane 8 + k to lane 2k + 1. Deinterleave is the inverse.
TM_HD F32x16 Interleave(F32x16 a) {
  const __m512i index = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  return {_mm512_permutexvar_ps(index, a.v)};
}
TM_HD F32x16 Deinterleave(F32x16 a) {
  const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return {_mm512_permutexvar_ps(index, a.v)};
}

TM_HD I32x16 LoadBytes(const void* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
TM_HD void StoreBytes(void* p, I32x16 a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
TM_HD I32x16 LoadShorts(const void* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
TM_HD void StoreShorts(void* p, I32x16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
// Stores 16 codes below 16 as 8 bytes, with code 2i in the low nibble of byte i.
TM_HD void StoreNibbles(void* p, I32x16 codes) {
  const __m512i both = _mm512_or_si512(codes.v, _mm512_srli_epi64(codes.v, 28));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm512_cvtepi64_epi8(both));
}
// Converts the low 16 bits of each lane from FP16.
TM_HD F32x16 HalfToFloat(I32x16 a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }
TM_HD F32x16 LoadHalf(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
// Returns the bits of the nearest FP16, ties to even.
TM_HD I32x16 FloatToHalf(F32x16 a) {
  return {_mm512_cvtepu16_epi32(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT))};
}

TM_HD Table16 LoadTable(const float* p) { return {_mm512_loadu_ps(p)}; }
// Returns table[lane & 15] in each lane.
TM_HD F32x16 Lookup(Table16 t, I32x16 index) { return {_mm512_permutexvar_ps(index.v, t.v)}; }

struct Table32 {
  __m512 low, high;
};
TM_HD Table32 LoadTable32(const float* p) { return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)}; }
// Returns table[lane & 31] in each lane.
TM_HD F32x16 Lookup(Table32 t, I32x16 index) {
  return {_mm512_permutex2var_ps(t.low, index.v, t.high)};
}
// Rounds toward zero. Returns 0x80000000 if the result does not fit.
TM_HD I32x16 Truncate(F32x16 a) { return {_mm512_cvttps_epi32(a.v)}; }

// Repeats eight bytes: even lanes hold the first four, odd lanes the last four.
TM_HD I32x16 Broadcast8(const void* p) {
  int64_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return {_mm512_set1_epi64(bits)};
}
// Loads the even or odd ones of 32 dwords.
template <int kOdd>
TM_HD I32x16 LoadEverySecond(const void* p) {
  const __m512i index =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const uint8_t* from = static_cast<const uint8_t*>(p);
  return {_mm512_permutex2var_epi32(_mm512_loadu_si512(from),
                                    _mm512_add_epi32(index, _mm512_set1_epi32(kOdd)),
                                    _mm512_loadu_si512(from + 64))};
}
// Loads the dword at p + i * stride into lane i.
TM_HD I32x16 GatherDwords(const void* p, int stride) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_i32gather_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(stride)), p, 1)};
}

TM_HD __m512i LoadFourRows(const uint8_t* p, int64_t stride) {
  const auto row = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 4 * i * stride));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
// Transposes each run of four lanes, a matrix whose row r is in a[r].
TM_HD void TransposeQuads(I32x16 (&a)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(a[0].v, a[1].v);
  const __m512i high01 = _mm512_unpackhi_epi32(a[0].v, a[1].v);
  const __m512i low23 = _mm512_unpacklo_epi32(a[2].v, a[3].v);
  const __m512i high23 = _mm512_unpackhi_epi32(a[2].v, a[3].v);
  a[0].v = _mm512_unpacklo_epi64(low01, low23);
  a[1].v = _mm512_unpackhi_epi64(low01, low23);
  a[2].v = _mm512_unpacklo_epi64(high01, high23);
  a[3].v = _mm512_unpackhi_epi64(high01, high23);
}
// Loads 16 rows of 16 bytes: lane i of out[c] is dword c of row i.
TM_HD void LoadTransposed(const uint8_t* p, int64_t stride, I32x16 (&out)[4]) {
  for (int r = 0; r < 4; ++r) {
    out[r].v = LoadFourRows(p + r * stride, stride);
  }
  TransposeQuads(out);
}

// Lanes as pairs of int16: the low and the high half of a dword.

struct ShortTable {
  __m512i v;  // the values twice, because the lookup uses five bits
};
TM_HD ShortTable LoadShortTable(const int16_t* p) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Returns table[half & 15] in each half.
TM_HD I32x16 LookupPairs(ShortTable t, I32x16 index) {
  return {_mm512_permutexvar_epi16(index.v, t.v)};
}
// Returns table[nibble K of the half] in each half.
template <int K>
TM_HD I32x16 LookupNibble(ShortTable t, I32x16 words) {
  return LookupPairs(t, ShiftRight<4 * K>(words));
}
// Returns sum + a.low * b.low + a.high * b.high.
TM_HD I32x16 DotPairs(I32x16 sum, I32x16 a, I32x16 b) { return {DotPairs(sum.v, a.v, b.v)}; }
// Loads 16 nibbles each from a (low halves) and b (high halves) into the low bits of each half. The
// bits above are undefined.
TM_HD I32x16 LoadNibblePairs(const void* a, const void* b) {
  int64_t x;
  int64_t y;
  __builtin_memcpy(&x, a, sizeof(x));
  __builtin_memcpy(&y, b, sizeof(y));
  // The start bit of each byte. Qword i holds the lanes 2i and 2i + 1.
  const __m512i from = _mm512_setr_epi64(0x0404040400000000, 0x0c0c0c0c08080808, 0x1414141410101010,
                                         0x1c1c1c1c18181818, 0x2424242420202020, 0x2c2c2c2c28282828,
                                         0x3434343430303030, 0x3c3c3c3c38383838);
  const __m512i low = _mm512_multishift_epi64_epi8(from, _mm512_set1_epi64(x));
  return {_mm512_mask_multishift_epi64_epi8(low, 0xcccccccccccccccc, from, _mm512_set1_epi64(y))};
}
// Loads 64 nibbles each from a (low halves) and b (high halves). Lane 4 j + g holds the nibbles
// 16 g + 4 j to 16 g + 4 j + 3 of both.
TM_HD I32x16 LoadNibbleRows(const uint8_t* a, const uint8_t* b) {
  const __m512i both = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a))),
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
  const __m512i words = _mm512_setr_epi32(
      0x100000, 0x140004, 0x180008, 0x1c000c, 0x110001, 0x150005, 0x190009, 0x1d000d, 0x120002,
      0x160006, 0x1a000a, 0x1e000e, 0x130003, 0x170007, 0x1b000b, 0x1f000f);
  return {_mm512_permutexvar_epi16(words, both)};
}
// Loads 16 bytes each from a (low halves) and b (high halves).
TM_HD I32x16 LoadBytePairs(const void* a, const void* b) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(a));
  const __m128i y = _mm_loadu_si128(static_cast<const __m128i*>(b));
  return {_mm512_cvtepu8_epi16(_mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_unpacklo_epi8(x, y)), _mm_unpackhi_epi8(x, y), 1))};
}

// Lanes as four runs of four.

// Loads the dword p[i % 4] into lane i.
TM_HD I32x16 LoadQuad(const void* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
// Packs each run: the four lanes of a as two pairs of int16, saturated, then those of b.
TM_HD I32x16 PackPairs(I32x16 a, I32x16 b) { return {_mm512_packs_epi32(a.v, b.v)}; }

}  // namespace turbomind::TM_ISA
