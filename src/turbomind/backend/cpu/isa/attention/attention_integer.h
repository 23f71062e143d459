#pragma once

// ⑦ Attention over integer codes (int8, int4, FP4) in integer arithmetic. Queries and softmax
// weights are rounded to 16 bits; codes are small integers (E2M1 doubled). Their products are
// summed exactly, so the order of a sum does not matter. Compared to the FP32 kernels (`exact`), a
// score changes by about 2^-16 of |q| |k| and an output by about 2^-16 of |v|.
//
//   score[t] = q_scale · Σ over groups g of 16 dimensions: scale[t, g] · Σ int16 q · code
//   o[d] += tile · f[g] · Σ over tokens t: int16(weight[t] · r[t, g]) · code
//
// where r[t, g] = scale[t, g] / f[g] <= 32767. The scales of a tile are folded into its weights, of
// which the largest is 1. Only the part of a tile that a query sees affects its bits.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"

namespace turbomind::TM_ISA {

constexpr bool IsInteger(Stored s) {
  return s == Stored::kInt8 || s == Stored::kInt4 || s == Stored::kFp4;
}

inline constexpr float kInt16Max = 32767.f;
inline constexpr int kGroupPairs = 8;  // pairs of 16 dimensions
inline constexpr int kTilePairs = kTileTokens / 2;
// Below this, 32767 / largest overflows. Such values count as zero.
inline constexpr float kMinLargest = 1e-30f;

// FP4 codes are E2M1 values times two.
alignas(64) inline constexpr int16_t kDoubledE2m1[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                         0, -1, -2, -3, -4, -6, -8, -12};
alignas(64) inline constexpr int16_t kUint4Shorts[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                         8, 9, 10, 11, 12, 13, 14, 15};

template <Stored S>
TM_HD ShortTable CodeTable() {
  return LoadShortTable(S == Stored::kFp4 ? kDoubledE2m1 : kUint4Shorts);
}
constexpr float CodeUnit(Stored s) { return s == Stored::kFp4 ? 0.5f : 1.f; }

// Keys: a dword of a row holds the dimensions 0 .. 2n - 1, n = PairsPerWord; its pair k is (k, n +
// k).
constexpr int PairsPerWord(Stored s) { return 16 / BitsOf(s); }

// Returns pair J of a piece. `words` is the result of LoadTransposed.
template <Stored S, int J>
TM_HD I32x16 KeyPairs(const I32x16 (&words)[4], const ShortTable& table) {
  const I32x16 word = words[J / PairsPerWord(S)];
  if constexpr (BitsOf(S) == 4) {
    return LookupNibble<J % 4>(table, word);
  } else {
    return And(ShiftRight<J % 2 * 8>(word), Set1Int(0x00ff00ff));
  }
}

// Number of groups whose 4-bit values are read in quads: four groups, or 64 dimensions, at a time.
// Lane 4 j + g of register k of a quad holds dimension 16 g + 4 j + k. TransposeQuads puts the sums
// back into the order of dimensions. The remaining groups, and all groups of 8-bit codes, are read
// one by one.
constexpr int GroupsInQuads(Stored s, int head_dim) {
  return BitsOf(s) == 4 ? head_dim / 64 * 4 : 0;
}

// Loads the values of two tokens. `row` points to the first of the quad's groups.
template <Stored S>
TM_HD void LoadValueQuad(const uint8_t* row, int64_t stride, const ShortTable& table,
                         I32x16 (&value)[4]) {
  const I32x16 words = LoadNibbleRows(row, row + stride);
  Unroll<4>([&](auto k) __attribute__((always_inline)) {
    value[decltype(k)::value] = LookupNibble<decltype(k)::value>(table, words);
  });
}

// Loads one group of two tokens. `row` points to the start of the row.
template <Stored S>
TM_HD I32x16 LoadValueGroup(const uint8_t* row, int64_t stride, int group,
                            const ShortTable& table) {
  if constexpr (BitsOf(S) == 8) {
    return LoadBytePairs(row + 16 * group, row + stride + 16 * group);
  } else {
    return LookupPairs(table, LoadNibblePairs(row + 8 * group, row + stride + 8 * group));
  }
}

// The result of rounding a query. The codes are stored in the order of the keys' pairs.
struct RoundedQuery {
  float scale;  // factor of the sums over codes; NaN if q contains NaN or an infinity
  float sum;    // Σ of the rounded values
};

// Returns the largest code of a rounded query. A score sums all dimensions in 32 bits, and codes of
// int8 keys reach 255: 32767 * 255 * 256 < 2^31. More dimensions have half the range.
constexpr float QueryLimit(Stored s, int head_dim) {
  return BitsOf(s) == 8 && head_dim > 256 ? 16383.f : kInt16Max;
}

// Rounds q[head_dim] to pairs[head_dim / 2].
template <Stored S>
TM_HD RoundedQuery RoundQuery(const float* q, int head_dim, int32_t* pairs) {
  F32x16 magnitude = Zero();
  I32x16 largest_bits = Set1Int(0);
  for (int d = 0; d < head_dim; d += kLanes) {
    const I32x16 bits = And(Bits(Load(q + d)), Set1Int(0x7fffffff));
    largest_bits = MaxInt(largest_bits, bits);
    magnitude = Max(magnitude, FromBits(bits));
  }
  const bool finite = Count(Less(largest_bits, Set1Int(0x7f800000))) == kLanes;
  const float largest = ReduceMax(magnitude);
  const float limit = QueryLimit(S, head_dim);
  const F32x16 inverse = Set1(finite && largest >= kMinLargest ? limit / largest : 0.f);
  I32x16 sum = Set1Int(0);
  for (int d = 0; d < head_dim; d += kLanes) {
    const I32x16 codes = finite ? ToInt(Mul(Load(q + d), inverse)) : Set1Int(0);
    sum = Add(sum, codes);
    // The low half of lane i of a word holds code i, the high half code i + kWord.
    constexpr int kWord = PairsPerWord(S);
    const I32x16 other = Bits(SwapLanes<kWord>(FromBits(codes)));
    alignas(64) int32_t both[kLanes];
    StoreInt(both, Or(And(codes, Set1Int(0xffff)), ShiftLeft<16>(other)));
    for (int word = 0; word < kLanes / (2 * kWord); ++word) {
      __builtin_memcpy(pairs + d / 2 + word * kWord, both + word * 2 * kWord,
                       kWord * sizeof(int32_t));
    }
  }
  const float total = ReduceAdd(ToFloat(sum));
  return {finite ? largest / limit * CodeUnit(S) : __builtin_nanf(""), total};
}

// Returns the scores of 16 tokens from the sums over the codes of all dimensions. `meta` comes from
// LoadAffine.
TM_HD F32x16 AffineScore(F32x16 total, float query_sum, const float* meta) {
  return Fma(Load(meta), total, Mul(Load(meta + kTileTokens), Set1(query_sum)));
}

// Number of groups of dimensions with their own value scale: one if the scale is the token's.
constexpr int ValueGroups(Stored s, int head_dim) { return IsAffine(s) ? 1 : head_dim / 16; }

// r and f for the positions [begin, end) of a tile; r is zero at the other positions.
struct ValueScales {
  int begin = 0;
  int end = 0;
  alignas(64) float r[kMaxHeadDim / 16 * kTileTokens];
  float f[kMaxHeadDim / 16];
};

// Returns the scales of positions [16 i, 16 i + 16) of a tile, with zero outside [begin, end).
TM_HD F32x16 SeenScales(const float* scales, int i, const Seen& seen) {
  const F32x16 all = Load(scales + 16 * i);
  return seen.begin == 0 && seen.end == kTileTokens
             ? all
             : Select(LaneRange(seen.begin - 16 * i, seen.end - 16 * i), all, Zero());
}

// Fills the groups [group, group + N) for FillValueScales.
template <Stored S, int N>
TM_HD void FillScalesOf(const float* meta, int group, const Seen& seen, ValueScales* out) {
  F32x16 max_scale[4] = {Zero(), Zero(), Zero(), Zero()};
  Unroll<N>([&](auto g) __attribute__((always_inline)) {
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      F32x16& to = max_scale[decltype(g)::value];
      const float* scales = meta + (group + decltype(g)::value) * kTileTokens;
      to = Max(to, SeenScales(scales, decltype(i)::value, seen));
    });
  });
  const F32x16 largest = MaxOfEach(max_scale);
  alignas(64) float inverse[kLanes];
  alignas(64) float f[kLanes];
  Store(inverse, Select(Less(largest, Set1(kMinLargest)), Zero(), Div(Set1(kInt16Max), largest)));
  Store(f, Mul(Div(largest, Set1(kInt16Max)), Set1(CodeUnit(S))));
  for (int g = 0; g < N; ++g) {
    out->f[group + g] = f[g];
    const F32x16 factor = Set1(inverse[g]);
    const float* scales = meta + (group + g) * kTileTokens;
    float* r = out->r + (group + g) * kTileTokens;
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      Store(r + 16 * decltype(i)::value, Mul(SeenScales(scales, decltype(i)::value, seen), factor));
    });
  }
}

template <Stored S>
TM_HD void FillValueScales(const float* meta, int head_dim, int begin, int end, ValueScales* out) {
  out->begin = begin;
  out->end = end;
  int group = 0;
  for (; group + 4 <= ValueGroups(S, head_dim); group += 4) {
    FillScalesOf<S, 4>(meta, group, {begin, end}, out);
  }
  for (; group < ValueGroups(S, head_dim); ++group) {
    FillScalesOf<S, 1>(meta, group, {begin, end}, out);
  }
}

// Rounds weights[kTileTokens] of one query head to pairs of consecutive tokens, as PairWeight reads
// them. Groups in quads come first, [groups / 4][kTilePairs][4] in PairWeight's order of pairs; the
// other groups follow as [groups][kTilePairs].
template <Stored S>
TM_HD void RoundWeights(const float* weights, const ValueScales& scales, int head_dim,
                        int32_t* pairs) {
  F32x16 w[4];
  for (int i = 0; i < 4; ++i) {
    w[i] = Load(weights + 16 * i);
  }
  int group = 0;
  if constexpr (!IsAffine(S)) {
    for (; group < GroupsInQuads(S, head_dim); group += 4) {
      const float* r = scales.r + group * kTileTokens;
      Unroll<2>([&](auto half) __attribute__((always_inline)) {
        constexpr int first = 2 * decltype(half)::value;
        I32x16 quads[4];
        Unroll<4>([&](auto g) __attribute__((always_inline)) {
          const float* from = r + decltype(g)::value * kTileTokens + 16 * first;
          quads[decltype(g)::value] = PackPairs(ToInt(Mul(w[first], Load(from))),
                                                ToInt(Mul(w[first + 1], Load(from + 16))));
        });
        TransposeQuads(quads);
        Unroll<4>([&](auto i) __attribute__((always_inline)) {
          constexpr int at = (2 * first + decltype(i)::value) * kLanes;
          StoreInt(pairs + group * kTilePairs + at, quads[decltype(i)::value]);
        });
      });
    }
  }
  for (; group < ValueGroups(S, head_dim); ++group) {
    for (int i = 0; i < 4; ++i) {
      StoreShorts(pairs + group * kTilePairs + 8 * i,
                  ToInt(Mul(w[i], Load(scales.r + group * kTileTokens + 16 * i))));
    }
  }
}

// Returns the weights of pair 2 * j + kOdd of 16 tokens for a quad of values. `pairs` points to the
// quad's weights, or to the head's if all groups share a scale.
template <Stored S, int kOdd>
TM_HD I32x16 PairWeight(const int32_t* pairs, int part, int j) {
  if constexpr (IsAffine(S)) {
    return Set1Int(pairs[8 * part + 2 * j + kOdd]);
  } else {
    return LoadQuad(pairs + (2 * part + kOdd) * kLanes + 4 * j);
  }
}

// Returns Σ weight · zero of affine values, which is added to every dimension.
template <Stored S>
TM_HD float WeightedZero(const float* weights, const float* meta, int begin, int end) {
  if constexpr (!IsAffine(S)) {
    return 0.f;
  }
  F32x16 sum = Zero();
  for (int i = 0; i < 4; ++i) {
    const F32x16 zero =
        Select(LaneRange(begin - 16 * i, end - 16 * i), Load(meta + kTileTokens + 16 * i), Zero());
    sum = Fma(Load(weights + 16 * i), zero, sum);
  }
  return ReduceAdd(sum);
}

// The factors that add a tile's sum to o. `tile` is the factor of the tile's softmax weights.
struct TileFactors {
  float old;
  float tile;
  float f;
  float zero;  // WeightedZero
};
template <Stored S>
TM_HD F32x16 AddTile(F32x16 o, F32x16 sum, const TileFactors& factors) {
  const F32x16 scaled = Mul(o, Set1(factors.old));
  if constexpr (IsAffine(S)) {
    return Fma(Fma(sum, Set1(factors.f), Set1(factors.zero)), Set1(factors.tile), scaled);
  } else {
    return Fma(sum, Set1(factors.f * factors.tile), scaled);
  }
}

}  // namespace turbomind::TM_ISA
