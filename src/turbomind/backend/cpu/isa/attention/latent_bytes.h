#pragma once

// ⑦ FP4 latents in 8 bits. A token's values are rounded to int8 with one scale of the token, which
// turns the products of all its groups into one integer sum. Queries are rounded to 8 bits per row,
// and softmax weights to 8 bits per row and tile; what rounding takes from a weight is passed on to
// the next token, so that a tile's weights keep their sum. Compared to FP32 (`exact`), an output of
// random latents changes by up to 2^-6 of the largest value (latent_attention_test.cc). FP4 itself
// has an error of 2^-4 of every value (docs/kv_cache.md).
//
// Integer sums have one value whatever their order, so every instruction set returns the same bits.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind::TM_ISA {

inline constexpr float kByteMax = 127.f;
inline constexpr float kRotaryMax = 4095.f;
static_assert(kRotaryMax * kRotaryMax * kMaxRotaryDim < 0x1p31f);
// One less than a byte holds: a remainder may come on top.
inline constexpr float kWeightMax = 254.f;
inline constexpr int kByteDims = 64;          // values that are expanded at once
inline constexpr int kValueRun = 16;          // values of a run of ByteTile::values
inline constexpr int kTokenBytes = 4;         // tokens whose values share a dword
inline constexpr float kLeastScale = 1e-30f;  // below it, a token or a row counts as zero

// A tile in 8 bits.
struct ByteTile {
  int8_t* keys;          // [kTileTokens, kLatentKeyStride], rank of each row
  int16_t* rotary;       // [kTileTokens, rotary_dim] of 13 bits
  float* rotary_scales;  // [kTileTokens] of each token
  // [rank / kValueRun, kTileTokens / kTokenBytes, kValueRun, kTokenBytes], in the order of ValueDim
  // within kByteDims
  int8_t* values;
  float* scales;     // [kTileTokens] of each token
  int32_t* offsets;  // [kTileTokens] -128 times the sum of a token's values
};

// Eight bits of a query, unsigned with an offset of 128, in dwords of four dimensions:
// [rank / 4, lanes]; and the scales of its lanes.
struct ByteQueries {
  int32_t* codes;
  float* scales;
  int32_t* sums;    // of a lane's bytes without the offset of 128
  int32_t* rotary;  // [rotary_dim / 2, lanes], pairs of 13 bits
  float* rotary_scales;
};

#if defined(TM_ISA_avx512)

// Returns sum + the products of four unsigned bytes of a with four signed ones of the dword at b.
TM_HD I32x16 DotBytes(I32x16 sum, I32x16 a, const void* b) { return {DotBytesOf(sum.v, a.v, b)}; }

// Returns sum + the products of the pairs of a with the pair at b.
TM_HD I32x16 DotPair(I32x16 sum, I32x16 a, const void* b) { return {DotPairsOf(sum.v, a.v, b)}; }

// Returns the dimension of dword `i` in a run of kByteDims dwords of ByteTile::values.
constexpr int ValueDim(int i) { return i % 16 / 4 * 16 + i / 16 * 4 + i % 4; }

// Expands four groups of 16 codes. `factors` has a factor of doubled E2M1 values per group, in both
// halves of a dword, times 2^8. Returns `sum` with the values added to its lanes.
TM_HD I32x16 ExpandGroups(I32x16 sum, const uint8_t* payload, const int32_t* factors, int8_t* out) {
  // 2^7 times the doubled values: mulhrs adds 2^14 and divides by 2^15.
  const __m512i doubled =
      _mm512_broadcast_i32x4(_mm_setr_epi16(0, 128, 256, 384, 512, 768, 1024, 1536));
  const __m512i of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m512i factor = _mm512_permutexvar_epi32(
      of_lane, _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(factors))));
  const __m512i positive = _mm512_mulhrs_epi16(doubled, factor);
  const __m512i table =
      _mm512_packs_epi16(positive, _mm512_sub_epi16(_mm512_setzero_si512(), positive));
  const __m512i bytes =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(payload)));
  constexpr int kOrAnd = 0xa8;  // (a | b) & c
  const __m512i codes =
      _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi16(bytes, 4), _mm512_set1_epi8(15), kOrAnd);
  const __m512i values = _mm512_shuffle_epi8(table, codes);
  _mm512_storeu_si512(out, values);
  return {_mm512_dpbusd_epi32(sum.v, _mm512_set1_epi8(1), values)};
}

// Interleaves kByteDims values of four tokens, `stride` bytes apart. The runs of the result lie a
// tile of values apart.
TM_HD void InterleaveTokens(const int8_t* keys, int64_t stride, int8_t* out) {
  const auto row = [&](int i) { return _mm512_loadu_si512(keys + i * stride); };
  const __m512i low01 = _mm512_unpacklo_epi8(row(0), row(1));
  const __m512i high01 = _mm512_unpackhi_epi8(row(0), row(1));
  const __m512i low23 = _mm512_unpacklo_epi8(row(2), row(3));
  const __m512i high23 = _mm512_unpackhi_epi8(row(2), row(3));
  constexpr int64_t next = kTileTokens * kValueRun;
  _mm512_storeu_si512(out, _mm512_unpacklo_epi16(low01, low23));
  _mm512_storeu_si512(out + next, _mm512_unpackhi_epi16(low01, low23));
  _mm512_storeu_si512(out + 2 * next, _mm512_unpacklo_epi16(high01, high23));
  _mm512_storeu_si512(out + 3 * next, _mm512_unpackhi_epi16(high01, high23));
}

TM_HD int32_t SumLanes(I32x16 x) { return _mm512_reduce_add_epi32(x.v); }

#else

TM_HD I32x16 DotBytes(I32x16 sum, const I32x16& a, const void* b) {
  int8_t bytes[4];
  __builtin_memcpy(bytes, b, sizeof(bytes));
  const auto pair = [&](int low, int high) {
    return Set1Int(static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | (low & 0xffff)));
  };
  const I32x16 even = And(a, Set1Int(0x00ff00ff));
  const I32x16 odd = And(ShiftRight<8>(a), Set1Int(0x00ff00ff));
  return DotPairs(DotPairs(sum, even, pair(bytes[0], bytes[2])), odd, pair(bytes[1], bytes[3]));
}

TM_HD I32x16 DotPair(const I32x16& sum, const I32x16& a, const void* b) {
  int32_t pair;
  __builtin_memcpy(&pair, b, sizeof(pair));
  return DotPairs(sum, a, Set1Int(pair));
}

constexpr int ValueDim(int i) { return i; }

TM_HD I32x16 ExpandGroups(const I32x16& sum, const uint8_t* payload, const int32_t* factors,
                          int8_t* out) {
  constexpr int8_t kDoubled[] = {0, 1, 2, 3, 4, 6, 8, 12};
  int32_t total = 0;
  for (int group = 0; group < kByteDims / 16; ++group) {
    const int factor = factors[group] & 0xffff;
    int8_t table[16];
    for (int code = 0; code < 8; ++code) {
      table[code] = static_cast<int8_t>((kDoubled[code] * factor + 128) >> 8);
      table[code + 8] = static_cast<int8_t>(-table[code]);
    }
    for (int i = 0; i < 8; ++i) {
      const uint8_t both = payload[8 * group + i];
      out[16 * group + 2 * i] = table[both & 15];
      out[16 * group + 2 * i + 1] = table[both >> 4];
      total += table[both & 15] + table[both >> 4];
    }
  }
  return Select(LaneRange(0, 1), Add(sum, Set1Int(total)), sum);
}

TM_HD void InterleaveTokens(const int8_t* keys, int64_t stride, int8_t* out) {
  for (int d = 0; d < kByteDims; ++d) {
    for (int token = 0; token < kTokenBytes; ++token) {
      const int64_t run = int64_t{d / kValueRun} * kTileTokens * kValueRun;
      out[run + d % kValueRun * kTokenBytes + token] = keys[token * stride + d];
    }
  }
}

// Returns the sum of the lanes of integers.
TM_HD int32_t SumLanes(const I32x16& x) {
  alignas(64) int32_t lanes[kLanes];
  StoreInt(lanes, x);
  int32_t sum = 0;
  for (const int32_t lane : lanes) {
    sum += lane;
  }
  return sum;
}

#endif

// The factors of a token's groups for ExpandGroups.
struct TokenFactors {
  alignas(64) int32_t of_group[kMaxLatentDim / 16 + kLanes];
};

// Finds how a token's FP4 values are rounded to 8 bits. Returns the token's scale; `factor` is the
// global one.
template <KvCacheMode M>
TM_HD float FindFactors(const uint8_t* metadata, int groups, float factor, TokenFactors* found) {
  int32_t* factors = found->of_group;
  F32x16 largest = Zero();
  for (int g = 0; g < groups; g += kLanes) {
    F32x16 scales;
    if (groups - g >= kLanes) {
      scales = ScaleValue<M, 0>(LoadBytes(metadata + g));
    } else {
      uint8_t bytes[kLanes] = {};
      for (int i = 0; i < groups - g; ++i) {
        bytes[i] = metadata[g + i];
      }
      scales = Select(LaneRange(0, groups - g), ScaleValue<M, 0>(LoadBytes(bytes)), Zero());
    }
    Store(reinterpret_cast<float*>(factors + g), scales);
    largest = Max(largest, scales);
  }
  const float top = ReduceMax(largest);
  // The largest code is 6: doubled 12, times a factor of at most 2^8 * 127 / 12.
  const float inverse = top >= kLeastScale ? 256.f * kByteMax / 12.f / top : 0.f;
  for (int g = 0; g < groups; g += kLanes) {
    const F32x16 scales = Load(reinterpret_cast<const float*>(factors + g));
    const I32x16 rounded = Truncate(Mul(scales, Set1(inverse)));
    StoreInt(factors + g, Or(rounded, ShiftLeft<16>(rounded)));
  }
  return top * (6.f / kByteMax) * factor;
}

// Rounds a token's FP4 values to 8 bits.
TM_HD void ExpandToken(const uint8_t* payload, int rank, const TokenFactors& factors, int token,
                       const ByteTile& to) {
  int8_t* keys = to.keys + token * kLatentKeyStride;
  I32x16 sum = Set1Int(0);
  for (int d = 0; d < rank; d += kByteDims) {
    sum = ExpandGroups(sum, payload + d / 2, factors.of_group + d / 16, keys + d);
  }
  to.offsets[token] = -128 * SumLanes(sum);
}

// Rounds the rotary part of a key to 13 bits.
inline void RoundRotary(const float* row, int dim, int token, const ByteTile& to) {
  I32x16 bits = Set1Int(0);
  for (int d = 0; d < dim; d += kLanes) {
    bits = MaxInt(bits, And(Bits(Load(row + d)), Set1Int(0x7fffffff)));
  }
  const bool finite = Count(Less(bits, Set1Int(0x7f800000))) == kLanes;
  const float top = finite ? ReduceMax(FromBits(bits)) : __builtin_nanf("");
  const F32x16 inverse = Set1(top >= kLeastScale ? kRotaryMax / top : 0.f);
  to.rotary_scales[token] = top * (1.f / kRotaryMax);
  for (int d = 0; d < dim; d += kLanes) {
    StoreShorts(to.rotary + token * dim + d, ToInt(Mul(Load(row + d), inverse)));
  }
}

// Rounds values of a block's queries, [dim, lanes], to integers of up to `limit`. Calls store(d,
// codes) for each of them. Returns the scales of the lanes, NaN for a query that is not finite.
template <class F>
TM_HD F32x16 RoundLanes(const float* q, int dim, float limit, F store) {
  I32x16 bits = Set1Int(0);
  for (int d = 0; d < dim; ++d) {
    bits = MaxInt(bits, And(Bits(Load(q + d * kLanes)), Set1Int(0x7fffffff)));
  }
  const F32x16 largest = FromBits(bits);
  const Mask16 finite = Less(bits, Set1Int(0x7f800000));
  const F32x16 divided = Div(Set1(limit), largest);
  const F32x16 inverse =
      Select(finite, Select(Less(largest, Set1(kLeastScale)), Zero(), divided), Zero());
  for (int d = 0; d < dim; ++d) {
    const F32x16 x = Select(finite, Load(q + d * kLanes), Zero());
    store(d, ToInt(Mul(x, inverse)));
  }
  return Select(finite, Mul(largest, Set1(1.f / limit)), Set1(__builtin_nanf("")));
}

// Rounds the queries of a block, [rank + rotary_dim, lanes].
inline void RoundToBytes(const float* q, int rank, int rotary_dim, const ByteQueries& to) {
  I32x16 bytes = Set1Int(0);
  I32x16 sum = Set1Int(0);
  Store(to.scales, RoundLanes(q, rank, kByteMax, [&](int d, const I32x16& codes) {
          sum = Add(sum, codes);
          const I32x16 byte = Add(codes, Set1Int(128));
          const I32x16 first = d % 4 == 0 ? Set1Int(0) : bytes;
          const I32x16 moved = d % 4 == 0   ? byte
                               : d % 4 == 1 ? ShiftLeft<8>(byte)
                               : d % 4 == 2 ? ShiftLeft<16>(byte)
                                            : ShiftLeft<24>(byte);
          bytes = Or(first, moved);
          StoreInt(to.codes + d / 4 * kLanes, bytes);
        }));
  StoreInt(to.sums, sum);
  I32x16 even = Set1Int(0);
  Store(to.rotary_scales,
        RoundLanes(q + rank * kLanes, rotary_dim, kRotaryMax, [&](int d, const I32x16& codes) {
          if (d % 2 == 0) {
            even = And(codes, Set1Int(0xffff));
          } else {
            StoreInt(to.rotary + d / 2 * kLanes, Or(even, ShiftLeft<16>(codes)));
          }
        }));
}

// Rounds the weights of a tile, [kTileTokens, lanes], times the scales of its tokens, to bytes: one
// dword per four tokens and lane. Returns the factor of sums over the bytes. Tokens outside [begin,
// end) get zeros.
inline F32x16 WeighBytes(const float* weights, const float* scales, int begin, int end,
                         int32_t* bytes) {
  F32x16 largest = Zero();
  for (int t = begin; t < end; ++t) {
    largest = Max(Mul(Load(weights + t * kLanes), Set1(scales[t])), largest);
  }
  const F32x16 inverse =
      Select(Less(largest, Set1(kLeastScale)), Zero(), Div(Set1(kWeightMax), largest));
  F32x16 rest = Zero();
  for (int first = begin / kTokenBytes * kTokenBytes; first < end; first += kTokenBytes) {
    I32x16 dword = Set1Int(0);
    Unroll<kTokenBytes>([&](auto i) __attribute__((always_inline)) {
      constexpr int at = decltype(i)::value;
      const int t = first + at;
      if (t >= begin && t < end) {
        const F32x16 scaled = Mul(Load(weights + t * kLanes), Set1(scales[t]));
        const F32x16 wanted = Fma(scaled, inverse, rest);
        const I32x16 code = MaxInt(ToInt(wanted), Set1Int(0));
        rest = Sub(wanted, ToFloat(code));
        dword = Or(dword, ShiftLeft<8 * at>(code));
      }
    });
    StoreInt(bytes + first / kTokenBytes * kLanes, dword);
  }
  return Mul(largest, Set1(1.f / kWeightMax));
}

}  // namespace turbomind::TM_ISA
