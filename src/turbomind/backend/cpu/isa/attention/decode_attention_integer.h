#pragma once

// ⑦ Decode over integer codes in integer arithmetic (attention_integer.h): the scores of a tile and
// the sum of its values for H query heads.
//
// Instructions per 32 FP4 key or value elements with AVX-512: a shift, a permute and one vpdpwssd
// per head. Keys add 1.5 for the transposition and, per head and 16 dimensions, 2 for the scales.
// Values add 0.5 for the order of their lanes and, per head, 0.25 for the weights. Both add 0.25 to
// prefetch the next tile.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/backend/cpu/isa/attention/decode_attention_args.h"

namespace turbomind::TM_ISA {

#if defined(TM_ISA_avx512)
inline constexpr int kScoreSums = 8;     // out of 32 registers
inline constexpr int kMaxQuadHeads = 4;  // with 4 sums each
#else
inline constexpr int kScoreSums = 1;
inline constexpr int kMaxQuadHeads = 3;
#endif
// Number of runs of 16 tokens per call. Several runs share a query's broadcast and hide the latency
// when there are few sums.
constexpr int kScoreParts(int heads) { return 2 * heads <= kScoreSums ? 2 : 1; }

// Adds a group of 16 dimensions: pairs [kFirst, kFirst + 8) of a piece. Prefetches as many bytes of
// the `next` runs.
template <Stored S, int H, int P, int kFirst>
TM_HD void AddKeyGroup(const I32x16 (&words)[P][4], const ShortTable& table, const int32_t* q,
                       const uint8_t* const (&next)[P], I32x16 (&sum)[P][H]) {
  Unroll<kGroupPairs>([&](auto index) __attribute__((always_inline)) {
    constexpr int j = decltype(index)::value;
    constexpr int kPairsPerLine = kGroupPairs / LinesPerGroup(S);
    Unroll<P>([&](auto part) __attribute__((always_inline)) {
      if constexpr (j % kPairsPerLine == 0) {
        PrefetchLine(next[decltype(part)::value], j / kPairsPerLine);
      }
    });
    I32x16 key[P];
    Unroll<P>([&](auto part) __attribute__((always_inline)) {
      constexpr int p = decltype(part)::value;
      key[p] = KeyPairs<S, kFirst + j>(words[p], table);
    });
    Unroll<H>([&](auto head) __attribute__((always_inline)) {
      constexpr int h = decltype(head)::value;
      const I32x16 x = Set1Int(q[j * H + h]);
      Unroll<P>([&](auto part) __attribute__((always_inline)) {
        constexpr int p = decltype(part)::value;
        sum[p][h] = DotPairs(sum[p][h], key[p], x);
      });
    });
  });
}

// Computes the scores of P runs of 16 tokens.
template <Stored S, int H, int P>
void ScoreTokensInteger(const ScoreArgs& args, int part) {
  const ShortTable table = CodeTable<S>();
  const TileSide& keys = *args.keys;
  const float* meta = keys.meta + 16 * part;
  F32x16 total[P][H];
  I32x16 sum[P][H];
  for (int p = 0; p < P; ++p) {
    for (int h = 0; h < H; ++h) {
      total[p][h] = Zero();
      sum[p][h] = Set1Int(0);
    }
  }
  for (int base = 0; base < args.head_dim; base += PieceDims(S)) {
    I32x16 words[P][4];
    for (int p = 0; p < P; ++p) {
      LoadTransposed(keys.rows[part + p] + base * BitsOf(S) / 8, keys.stride, words[p]);
    }
    Unroll<PieceDims(S) / 16>([&](auto piece) __attribute__((always_inline)) {
      constexpr int first = decltype(piece)::value * 16;
      if (first > 0 && base + first >= args.head_dim) {
        return;  // the load read into the next row, which the block holds
      }
      const uint8_t* next[P];
      for (int p = 0; p < P; ++p) {
        next[p] = keys.next[part + p] + (base + first) / 16 * LinesPerGroup(S) * 64;
      }
      AddKeyGroup<S, H, P, first / 2>(words, table, args.pairs + (base + first) / 2 * H, next, sum);
      if constexpr (IsGrouped(S)) {
        for (int p = 0; p < P; ++p) {
          const F32x16 scale = Load(meta + (base + first) / 16 * kTileTokens + 16 * p);
          for (int h = 0; h < H; ++h) {
            total[p][h] = Fma(ToFloat(sum[p][h]), scale, total[p][h]);
            sum[p][h] = Set1Int(0);
          }
        }
      }
    });
  }
  for (int p = 0; p < P; ++p) {
    for (int h = 0; h < H; ++h) {
      if constexpr (IsAffine(S)) {
        total[p][h] = AffineScore(ToFloat(sum[p][h]), args.qsum[h], meta + 16 * p);
      }
      Store(args.scores + h * kTileTokens + 16 * (part + p), total[p][h]);
    }
  }
}

template <Stored S, int H>
void ScoreTileInteger(const ScoreArgs& args) {
  constexpr int P = kScoreParts(H);
  for (int part = 0; part < 4; part += P) {
    if (args.keys->rows[part] != nullptr && args.keys->rows[part + P - 1] != nullptr) {
      ScoreTokensInteger<S, H, P>(args, part);
      continue;
    }
    for (int p = part; p < part + P; ++p) {
      if (args.keys->rows[p] != nullptr) {
        ScoreTokensInteger<S, H, 1>(args, p);
      }
    }
  }
}

// Computes o = o * old + tile * f * sum for 16 dimensions of one head.
template <Stored S>
TM_HD void AddSum(const ValueArgs& args, int head, int group, I32x16 sum, float zero) {
  const int scale = IsAffine(S) ? 0 : group;  // groups have scales of their own or share one
  float* o = args.o + head * args.head_dim + 16 * group;
  Store(o, AddTile<S>(Load(o), ToFloat(sum),
                      {args.old[head], args.tile[head], args.scales->f[scale], zero}));
}

// Computes part P of the sums of four groups of dimensions for the heads [first, first + H). It
// reads whole runs of 16 tokens, because hidden tokens have a weight of zero.
template <Stored S, int H, int P>
TM_HD void SumQuad(const ValueArgs& args, int first, int group, I32x16 (&sum)[H][4]) {
  const ShortTable table = CodeTable<S>();
  const TileSide& values = *args.values;
  Part of[H][4];
  Unroll<4 * H>([&](auto i) __attribute__((always_inline)) {
    of[decltype(i)::value / 4][decltype(i)::value % 4] = PartOf<P>(Set1Int(0));
  });
  const int stride = ValueGroups(S, args.head_dim) * kTilePairs;
  const int32_t* weights = args.weight_pairs + first * stride;
  weights += IsAffine(S) ? 0 : group * kTilePairs;
  for (int run = args.begin / 16; run * 16 < args.end; ++run) {
    const uint8_t* row = values.rows[run] + 8 * group;
    const uint8_t* next = values.next[run] + group * LinesPerGroup(S) * 64;
    for (int j = 0; j < 4; ++j) {
      Unroll<2>([&](auto odd) __attribute__((always_inline)) {
        if constexpr (P == 0) {
          PrefetchLine(next, 2 * j + decltype(odd)::value);
        }
        const Part words = PartOf<P>(LoadNibbleRows(row, row + values.stride));
        row += 2 * values.stride;
        Part value[4];
        Unroll<4>([&](auto k) __attribute__((always_inline)) {
          value[decltype(k)::value] = LookupNibble<decltype(k)::value>(table, words);
        });
        Unroll<H>([&](auto head) __attribute__((always_inline)) {
          constexpr int h = decltype(head)::value;
          const Part weight =
              PartOf<P>(PairWeight<S, decltype(odd)::value>(weights + h * stride, run, j));
          Unroll<4>([&](auto k) __attribute__((always_inline)) {
            Part& to = of[h][decltype(k)::value];
            to = DotPairs(to, value[decltype(k)::value], weight);
          });
        });
      });
    }
  }
  Unroll<4 * H>([&](auto i) __attribute__((always_inline)) {
    constexpr int h = decltype(i)::value / 4;
    constexpr int k = decltype(i)::value % 4;
    SetPart<P>(sum[h][k], of[h][k]);
  });
}

// Adds four groups of dimensions for the heads [first, first + H).
template <Stored S, int H>
TM_HD void AddQuad(const ValueArgs& args, const float* zeros, int first, int group) {
  I32x16 sum[H][4];
  Unroll<kParts>([&](auto part) __attribute__((always_inline)) {
    SumQuad<S, H, decltype(part)::value>(args, first, group, sum);
  });
  Unroll<H>([&](auto head) __attribute__((always_inline)) {
    constexpr int h = decltype(head)::value;
    TransposeQuads(sum[h]);
    Unroll<4>([&](auto g) __attribute__((always_inline)) {
      AddSum<S>(args, first + h, group + decltype(g)::value, sum[h][decltype(g)::value],
                zeros[first + h]);
    });
  });
}

// Adds groups of dimensions whose values are read one group at a time.
template <Stored S, int H, int Groups>
TM_HD void AddGroupsInteger(const ValueArgs& args, const float* zeros, int group) {
  const ShortTable table = CodeTable<S>();
  const TileSide& values = *args.values;
  constexpr int kStep = IsAffine(S) ? 0 : 1;
  I32x16 sum[H][Groups];
  Unroll<H>([&](auto h) __attribute__((always_inline)) {
    Unroll<Groups>([&](auto g) __attribute__((always_inline)) {
      sum[decltype(h)::value][decltype(g)::value] = Set1Int(0);
    });
  });
  const int32_t* weights = args.weight_pairs + kStep * group * kTilePairs;
  const int stride = ValueGroups(S, args.head_dim) * kTilePairs;
  for (int part = args.begin / 16; part * 16 < args.end; ++part) {
    const uint8_t* row = values.rows[part];
    const uint8_t* next = values.next[part] + group * LinesPerGroup(S) * 64;
    for (int pair = 0; pair < 8; ++pair, row += 2 * values.stride) {
      const int32_t* w = weights + 8 * part + pair;
      constexpr int kLines = (Groups * LinesPerGroup(S) + 7) / 8;
      Unroll<kLines>([&](auto line) __attribute__((always_inline)) {
        PrefetchLine(next, pair * kLines + decltype(line)::value);
      });
      Unroll<Groups>([&](auto g) __attribute__((always_inline)) {
        constexpr int at = decltype(g)::value;
        const I32x16 value = LoadValueGroup<S>(row, values.stride, group + at, table);
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
      AddSum<S>(args, h, group + decltype(g)::value, sum[h][decltype(g)::value], zeros[h]);
    });
  });
}

template <Stored S, int H>
void AddValuesInteger(const ValueArgs& args) {
  constexpr int kGroups = H <= 4 ? 4 : 2;
  constexpr int kQuadHeads = H <= kMaxQuadHeads ? H : H / 2;
  static_assert(H % kQuadHeads == 0 && kQuadHeads <= kMaxQuadHeads);
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
  if constexpr (BitsOf(S) == 4) {
    for (; group < GroupsInQuads(S, args.head_dim); group += 4) {
      for (int h = 0; h < H; h += kQuadHeads) {
        AddQuad<S, kQuadHeads>(args, zeros, h, group);
      }
    }
  } else {
    for (; group + kGroups <= num_groups; group += kGroups) {
      AddGroupsInteger<S, H, kGroups>(args, zeros, group);
    }
  }
  for (; group < num_groups; ++group) {
    AddGroupsInteger<S, H, 1>(args, zeros, group);
  }
}

}  // namespace turbomind::TM_ISA
