#pragma once

// ⑦ Prefill over integer codes in integer arithmetic (attention_integer.h). A tile of the cache is
// unpacked into pairs of int16. Each row then runs the same operations as decode.
//
// Compute bound: 24 vpdpwssd of 32 products for 4 loads with AVX-512.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"

namespace turbomind::TM_ISA {

template <Stored S>
void UnpackKeyPairs(const Block& b) {
  const ShortTable table = CodeTable<S>();
  const TileSide& side = b.side[0];
  for (int part = 0; part < 4; ++part) {
    if (side.rows[part] == nullptr) {
      continue;
    }
    for (int base = 0; base < b.head_dim; base += PieceDims(S)) {
      I32x16 words[4];
      LoadTransposed(side.rows[part] + base * BitsOf(S) / 8, side.stride, words);
      int32_t* keys = b.key_pairs() + base / 2 * kTileTokens + 16 * part;
      Unroll<PieceDims(S) / 2>([&](auto index) __attribute__((always_inline)) {
        constexpr int j = decltype(index)::value;
        if (j < kGroupPairs || base + 16 < b.head_dim) {  // else this is part of the next row
          StoreInt(keys + j * kTileTokens, KeyPairs<S, j>(words, table));
        }
      });
    }
  }
}

// Calls fn(Index<r>(), Index<c>()) for all r < R and c < C.
template <int R, int C, class F>
TM_HD void UnrollPairs(F fn) {
  Unroll<R>([&](auto r) __attribute__((always_inline)) {
    Unroll<C>([&](auto c) __attribute__((always_inline)) { fn(r, c); });
  });
}

// Computes the scores of R rows and C columns of 16 tokens.
template <Stored S, int R, int C>
TM_HD void ScoreRowsInteger(const Block& b, int row, int column) {
  const float* meta = b.side[0].meta + column;
  const int stride = b.head_dim / 2;
  const int step = IsGrouped(S) ? kGroupPairs : stride;  // pairs that share a scale
  const int32_t* q = b.queries->pairs + row * stride;
  const int32_t* keys = b.key_pairs() + column;
  float* scores = b.scores + row * kTileTokens + column;
  for (int first = 0; first < stride; first += step, meta += kTileTokens) {
    I32x16 sum[R][C];
    UnrollPairs<R, C>([&](auto r, auto c) __attribute__((always_inline)) {
      sum[decltype(r)::value][decltype(c)::value] = Set1Int(0);
    });
    for (int pair = first; pair < first + step; ++pair) {
      I32x16 key[C];
      Unroll<C>([&](auto c) __attribute__((always_inline)) {
        key[decltype(c)::value] = LoadInt(keys + pair * kTileTokens + 16 * decltype(c)::value);
      });
      Unroll<R>([&](auto r) __attribute__((always_inline)) {
        const I32x16 x = Set1Int(q[decltype(r)::value * stride + pair]);
        Unroll<C>([&](auto c) __attribute__((always_inline)) {
          I32x16& to = sum[decltype(r)::value][decltype(c)::value];
          to = DotPairs(to, key[decltype(c)::value], x);
        });
      });
    }
    UnrollPairs<R, C>([&](auto r, auto c) __attribute__((always_inline)) {
      const I32x16 total = sum[decltype(r)::value][decltype(c)::value];
      const float* scale = meta + 16 * decltype(c)::value;
      float* at = scores + decltype(r)::value * kTileTokens + 16 * decltype(c)::value;
      if constexpr (IsAffine(S)) {
        Store(at, AffineScore(ToFloat(total), b.queries->sum[row + decltype(r)::value], scale));
      } else {
        Store(at, Fma(ToFloat(total), Load(scale), first == 0 ? Zero() : Load(at)));
      }
    });
  }
}

template <Stored S>
void ScoreTileInteger(const Block& b) {
  for (int column = 0; column < kTileTokens; column += 16 * kColumns) {
    int row = 0;
    for (; row + kRows <= b.rows; row += kRows) {
      ScoreRowsInteger<S, kRows, kColumns>(b, row, column);
    }
    for (; row < b.rows; ++row) {
      ScoreRowsInteger<S, 1, kColumns>(b, row, column);
    }
  }
}

// Unpacks whole runs of 16 tokens, because hidden tokens have a weight of zero. Quads stay in the
// order of their lanes.
template <Stored S>
void UnpackValuePairs(const Block& b, int begin, int end) {
  const ShortTable table = CodeTable<S>();
  const TileSide& side = b.side[1];
  for (int pair = begin / 16 * 8; pair < (end + 15) / 16 * 8; ++pair) {
    const uint8_t* row = side.rows[pair / 8] + 2 * (pair % 8) * side.stride;
    int32_t* to = b.value_pairs() + pair * b.head_dim;
    int group = 0;
    if constexpr (BitsOf(S) == 4) {
      for (; group < GroupsInQuads(S, b.head_dim); group += 4) {
        I32x16 value[4];
        LoadValueQuad<S>(row + 8 * group, side.stride, table, value);
        for (int k = 0; k < 4; ++k) {
          StoreInt(to + 16 * (group + k), value[k]);
        }
      }
    }
    for (; group < b.head_dim / 16; ++group) {
      StoreInt(to + 16 * group, LoadValueGroup<S>(row, side.stride, group, table));
    }
  }
}

// The rounded weights of a few rows and the factors that add their sums to o.
template <int R>
struct RowWeights {
  static constexpr int kPairs = kMaxHeadDim / 16 * kTilePairs;
  alignas(64) int32_t pairs[R][kPairs];
  float f[R][kMaxHeadDim / 16];
  float zero[R];
};

// Computes o = o * old + tile * f * sum for row `row + r` and 16 dimensions.
template <Stored S, int R>
TM_HD void AddRowSum(const Block& b, const RowWeights<R>& weights, int row, int r, int group,
                     I32x16 sum) {
  const int at = row + r;
  float* o = b.o + at * b.head_dim + 16 * group;
  Store(o, AddTile<S>(
               Load(o), ToFloat(sum),
               {b.old[at], b.tile[at], weights.f[r][IsAffine(S) ? 0 : group], weights.zero[r]}));
}

// Adds the four groups of a quad for the rows [row + first, row + first + N). It reads every run of
// 16 tokens that `any` touches.
template <Stored S, int N, int R>
TM_HD void AddQuadOfRows(const Block& b, const RowWeights<R>& weights, int row, int first,
                         int group, const Seen& any) {
  I32x16 sum[N][4];
  UnrollPairs<N, 4>([&](auto r, auto k) __attribute__((always_inline)) {
    sum[decltype(r)::value][decltype(k)::value] = Set1Int(0);
  });
  const int32_t* w = weights.pairs[first] + (IsAffine(S) ? 0 : group * kTilePairs);
  for (int part = any.begin / 16; part * 16 < any.end; ++part) {
    const int32_t* from = b.value_pairs() + 8 * part * b.head_dim + 16 * group;
    for (int j = 0; j < 4; ++j) {
      Unroll<2>([&](auto odd) __attribute__((always_inline)) {
        I32x16 value[4];
        Unroll<4>([&](auto k) __attribute__((always_inline)) {
          value[decltype(k)::value] = LoadInt(from + 16 * decltype(k)::value);
        });
        from += b.head_dim;
        Unroll<N>([&](auto index) __attribute__((always_inline)) {
          constexpr int r = decltype(index)::value;
          const I32x16 weight =
              PairWeight<S, decltype(odd)::value>(w + r * RowWeights<R>::kPairs, part, j);
          Unroll<4>([&](auto k) __attribute__((always_inline)) {
            I32x16& to = sum[r][decltype(k)::value];
            to = DotPairs(to, value[decltype(k)::value], weight);
          });
        });
      });
    }
  }
  Unroll<N>([&](auto index) __attribute__((always_inline)) {
    constexpr int r = decltype(index)::value;
    TransposeQuads(sum[r]);
    for (int g = 0; g < 4; ++g) {
      AddRowSum<S>(b, weights, row, first + r, group + g, sum[r][g]);
    }
  });
}

// Adds G groups that are read one by one, for R rows.
template <Stored S, int R, int G>
TM_HD void AddPairs(const Block& b, const RowWeights<R>& weights, int row, int group,
                    const Seen& any) {
  constexpr int kStep = IsAffine(S) ? 0 : 1;  // groups have weights of their own or share them
  I32x16 sum[R][G];
  UnrollPairs<R, G>([&](auto r, auto g) __attribute__((always_inline)) {
    sum[decltype(r)::value][decltype(g)::value] = Set1Int(0);
  });
  const int32_t* w = weights.pairs[0] + kStep * group * kTilePairs;
  for (int pair = any.begin / 16 * 8; pair < (any.end + 15) / 16 * 8; ++pair) {
    const int32_t* from = b.value_pairs() + pair * b.head_dim + 16 * group;
    Unroll<G>([&](auto g) __attribute__((always_inline)) {
      const I32x16 value = LoadInt(from + 16 * decltype(g)::value);
      Unroll<R>([&](auto r) __attribute__((always_inline)) {
        constexpr int at =
            decltype(r)::value * RowWeights<R>::kPairs + kStep * decltype(g)::value * kTilePairs;
        I32x16& to = sum[decltype(r)::value][decltype(g)::value];
        to = DotPairs(to, value, Set1Int(w[at + pair]));
      });
    });
  }
  UnrollPairs<R, G>([&](auto r, auto g) __attribute__((always_inline)) {
    constexpr int i = decltype(r)::value;
    AddRowSum<S>(b, weights, row, i, group + decltype(g)::value, sum[i][decltype(g)::value]);
  });
}

// Number of rows whose sums of a quad fit in the registers.
inline constexpr int kQuadRows = kRows * kColumns / 4;

template <Stored S, int R>
void AddRowPairs(const Block& b, const View& view, int tile, const ValueScales& shared, int row) {
  const Seen any = {shared.begin, shared.end};
  RowWeights<R> weights;
  ValueScales own;
  for (int r = 0; r < R; ++r) {
    const Seen seen = SeenByRow(b, view, tile, row + r);
    const bool sees_all = seen.begin == any.begin && seen.end == any.end;
    if (!sees_all) {
      FillValueScales<S>(b.side[1].meta, b.head_dim, seen.begin, seen.end, &own);
    }
    const ValueScales& scales = sees_all ? shared : own;
    const float* w = b.scores + (row + r) * kTileTokens;
    RoundWeights<S>(w, scales, b.head_dim, weights.pairs[r]);
    weights.zero[r] = WeightedZero<S>(w, b.side[1].meta, seen.begin, seen.end);
    for (int group = 0; group < ValueGroups(S, b.head_dim); ++group) {
      weights.f[r][group] = scales.f[group];
    }
  }
  const int num_groups = b.head_dim / 16;
  int group = 0;
  if constexpr (BitsOf(S) == 4) {
    constexpr int N = R < kQuadRows ? R : kQuadRows;
    for (; group < GroupsInQuads(S, b.head_dim); group += 4) {
      for (int first = 0; first < R; first += N) {
        AddQuadOfRows<S, N>(b, weights, row, first, group, any);
      }
    }
  } else {
    for (; group + kColumns <= num_groups; group += kColumns) {
      AddPairs<S, R, kColumns>(b, weights, row, group, any);
    }
  }
  for (; group < num_groups; ++group) {
    AddPairs<S, R, 1>(b, weights, row, group, any);
  }
}

template <Stored S>
void AddTileValuesInteger(const Block& b, const View& view, int tile, const Seen& any) {
  UnpackValuePairs<S>(b, any.begin, any.end);
  ValueScales shared;
  FillValueScales<S>(b.side[1].meta, b.head_dim, any.begin, any.end, &shared);
  int row = 0;
  for (; row + kRows <= b.rows; row += kRows) {
    AddRowPairs<S, kRows>(b, view, tile, shared, row);
  }
  for (; row < b.rows; ++row) {
    AddRowPairs<S, 1>(b, view, tile, shared, row);
  }
}

}  // namespace turbomind::TM_ISA
