#pragma once

// ⑦ Decode over integer codes in integers (attention_integer.h): the scores of a tile and the sum
// of its values for H query heads.
//
// Instructions per 32 key or value elements of FP4 with AVX-512: keys a shift and a permute, values
// two bit-field gathers and a permute, and one vpdpwssd per head; keys add 0.75 for the
// transposition and 2 per head and 16 dimensions for the scales.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention_decode_args.h"
#include "turbomind/backend/cpu/isa/attention_views.h"

namespace turbomind::TM_ISA {

// Adds a group of 16 dimensions, pairs [first, first + 8) of a piece.
template <Stored S, int H>
TM_HD void AddKeyGroup(const I32x16 (&words)[4], const ShortTable& table, const int32_t* q,
                       int stride, I32x16 (&sum)[H], int first) {
  Unroll<kGroupPairs>([&](auto index) __attribute__((always_inline)) {
    constexpr int j = decltype(index)::value;
    const I32x16 key = KeyPairs<S>(words, first + j, table);
    Unroll<H>([&](auto head) __attribute__((always_inline)) {
      constexpr int h = decltype(head)::value;
      sum[h] = DotPairs(sum[h], key, Set1Int(q[h * stride + j]));
    });
  });
}

template <Stored S, int H>
void ScoreTokensInteger(const ScoreArgs& args, int part) {
  const ShortTable table = CodeTable<S>();
  const TileSide& keys = *args.keys;
  const float* meta = keys.meta + 16 * part;
  const int stride = args.head_dim / 2;
  F32x16 total[H];
  I32x16 sum[H];
  for (int h = 0; h < H; ++h) {
    total[h] = Zero();
    sum[h] = Set1Int(0);
  }
  for (int base = 0; base < args.head_dim; base += PieceDims(S)) {
    I32x16 words[4];
    LoadTransposed(keys.rows[part] + base * BitsOf(S) / 8, keys.stride, words);
    Unroll<PieceDims(S) / 16>([&](auto piece) __attribute__((always_inline)) {
      constexpr int first = decltype(piece)::value * 16;
      if (first > 0 && base + first >= args.head_dim) {
        return;  // the load ran into the next row, which the block holds
      }
      AddKeyGroup<S, H>(words, table, args.pairs + (base + first) / 2, stride, sum, first / 2);
      if constexpr (IsGrouped(S)) {
        const F32x16 scale = Load(meta + (base + first) / 16 * kTileTokens);
        for (int h = 0; h < H; ++h) {
          total[h] = Fma(ToFloat(sum[h]), scale, total[h]);
          sum[h] = Set1Int(0);
        }
      }
    });
  }
  for (int h = 0; h < H; ++h) {
    if constexpr (IsAffine(S)) {
      total[h] = AffineScore(ToFloat(sum[h]), args.qsum[h], meta);
    }
    Store(args.scores + h * kTileTokens + 16 * part, total[h]);
  }
}

template <Stored S, int H>
void ScoreTileInteger(const ScoreArgs& args) {
  for (int part = 0; part < 4; ++part) {
    if (args.keys->rows[part] != nullptr) {
      ScoreTokensInteger<S, H>(args, part);
    }
  }
}

// Dimensions of Groups groups: o = o * old + tile * f * Σ weight · code.
template <Stored S, int H, int Groups>
TM_HD void AddGroupsInteger(const ValueArgs& args, const float (&zeros)[H], int group) {
  const ShortTable table = CodeTable<S>();
  const TileSide& values = *args.values;
  constexpr int kStep = IsAffine(S) ? 0 : 1;  // groups have weights of their own, or share them
  I32x16 sum[H][Groups];
  Unroll<H>([&](auto h) __attribute__((always_inline)) {
    Unroll<Groups>([&](auto g) __attribute__((always_inline)) {
      sum[decltype(h)::value][decltype(g)::value] = Set1Int(0);
    });
  });
  const int32_t* weights = args.weight_pairs + kStep * group * kTilePairs;
  const int stride = ValueGroups(S, args.head_dim) * kTilePairs;
  for (int part = args.begin / 16; part * 16 < args.end; ++part) {
    const int first = Larger(args.begin - part * 16, 0) / 2;
    const int last = (Smaller(args.end - part * 16, 16) + 1) / 2;
    const uint8_t* row = values.rows[part] + 2 * first * values.stride;
    for (int pair = first; pair < last; ++pair, row += 2 * values.stride) {
      const int32_t* w = weights + 8 * part + pair;
      EachValueGroup<S, Groups>(
          row, values.stride, group,
          table, [&](auto g, I32x16 value) __attribute__((always_inline)) {
            constexpr int at = decltype(g)::value;
            Unroll<H>([&](auto h) __attribute__((always_inline)) {
              I32x16& to = sum[decltype(h)::value][at];
              to = DotPairs(to, value,
                            Set1Int(w[decltype(h)::value * stride + kStep * at * kTilePairs]));
            });
          });
    }
  }
  Unroll<H>([&](auto head) __attribute__((always_inline)) {
    constexpr int h = decltype(head)::value;
    Unroll<Groups>([&](auto g) __attribute__((always_inline)) {
      const int at = group + decltype(g)::value;
      float* o = args.o + h * args.head_dim + 16 * at;
      Store(o, AddTile<S>(Load(o), ToFloat(sum[h][decltype(g)::value]),
                          {args.old[h], args.tile[h], args.scales->f[kStep * at], zeros[h]}));
    });
  });
}

template <Stored S, int H>
void AddValuesInteger(const ValueArgs& args) {
  constexpr int kGroups = H <= 4 ? 4 : 2;
  const int num_groups = args.head_dim / 16;
  const int shared = ValueGroups(S, args.head_dim);
  FillValueScales<S>(args.values->meta, args.head_dim, args.begin, args.end, args.scales);
  float zeros[H];
  for (int h = 0; h < H; ++h) {
    const float* weights = args.weights + h * kTileTokens;
    RoundWeights<S>(weights, *args.scales, args.head_dim,
                    args.weight_pairs + h * shared * kTilePairs);
    zeros[h] = WeightedZero<S>(weights, args.values->meta, args.begin, args.end);
  }
  int group = 0;
  for (; group + kGroups <= num_groups; group += kGroups) {
    AddGroupsInteger<S, H, kGroups>(args, zeros, group);
  }
  for (; group < num_groups; ++group) {
    AddGroupsInteger<S, H, 1>(args, zeros, group);
  }
}

}  // namespace turbomind::TM_ISA
