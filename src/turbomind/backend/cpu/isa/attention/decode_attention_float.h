#pragma once

// ⑦ Decode in FP32: the scores of a tile and the sum of its values for H query heads. Codes are
// dequantized in registers, once for all heads.
//
// Instructions per 16 FP4 key or value elements with AVX-512: a shift, a permute and one FMA per
// head. Keys add 0.75 for the transposition; values add 2 for broadcast and scale.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/decode_attention_args.h"

namespace turbomind::TM_ISA {

// Prefetches the lines of the next tile's run that belong to dimension kDim of a piece. A piece
// covers four lines.
template <Stored S, int kDim>
TM_HD void PrefetchPiece(const uint8_t* run, int first) {
  constexpr int kDimsPerLine = PieceDims(S) / 4;
  if constexpr (kDim % kDimsPerLine == 0) {
    PrefetchLine(run, first / kDimsPerLine + kDim / kDimsPerLine);
  }
}

// Adds dimension d of a step, whose lanes are `key`, to the sums of a group of 16 dimensions. Adds
// the sums of a complete group to the totals.
template <Stored S, int H>
TM_HD void AddKey(F32x16 key, const ScoreArgs& args, const float* meta, int d, F32x16 (&sum)[H],
                  F32x16 (&total)[H]) {
  Unroll<H>([&](auto head) __attribute__((always_inline)) {
    constexpr int h = decltype(head)::value;
    sum[h] = Fma(key, Set1(args.q[h * args.head_dim + d]), sum[h]);
    if (d % 16 == 15) {
      total[h] = IsGrouped(S) ? Fma(sum[h], Load(meta + d / 16 * kTileTokens), total[h])
                              : Add(total[h], sum[h]);
      sum[h] = Zero();
    }
  });
}

// Computes the scores of 16 tokens. Sums cover 16 dimensions at a time and are scaled as they are
// added.
template <Stored S, int H>
void ScoreTokens(const ScoreArgs& args, int part) {
  constexpr int kStep = StepDims(S);
  constexpr int kPiece = PieceDims(S);
  const Table16 table = NibbleTable < BitsOf(S) == 4 ? S : Stored::kFp4 > ();
  const TileSide& keys = *args.keys;
  const float* meta = keys.meta + 16 * part;
  F32x16 total[H];
  F32x16 sum[H];
  for (int h = 0; h < H; ++h) {
    total[h] = Zero();
    sum[h] = Zero();
  }
  for (int step = 0; step < args.head_dim; step += kStep) {
    // With an odd number of groups, the last load reads past the row into the next one. The block
    // holds that row, because a key row is never the last row of its block. Those dimensions are
    // skipped.
    const bool two_groups = kStep == 16 || step + 16 < args.head_dim;
    Unroll<kStep / kPiece>([&](auto piece) __attribute__((always_inline)) {
      constexpr int first = decltype(piece)::value * kPiece;
      I32x16 words[4];
      LoadTransposed(keys.rows[part] + (step + first) * BitsOf(S) / 8, keys.stride, words);
      Unroll<(kPiece < 16 ? kPiece : 16)>([&](auto j) __attribute__((always_inline)) {
        constexpr int d = decltype(j)::value;
        PrefetchPiece<S, d>(keys.next[part], step + first);
        AddKey<S, H>(KeyLane<S>(words, d, table), args, meta, step + first + d, sum, total);
      });
      if (kPiece > 16 && two_groups) {
        Unroll<(kPiece > 16 ? 16 : 0)>([&](auto j) __attribute__((always_inline)) {
          constexpr int d = decltype(j)::value + 16;
          PrefetchPiece<S, d>(keys.next[part], step + first);
          AddKey<S, H>(KeyLane<S>(words, d, table), args, meta, step + first + d, sum, total);
        });
      }
    });
  }
  for (int h = 0; h < H; ++h) {
    if (IsAffine(S)) {
      total[h] = Fma(Load(meta), total[h], Mul(Load(meta + kTileTokens), Set1(args.qsum[h])));
    }
    Store(args.scores + h * kTileTokens + 16 * part, total[h]);
  }
}

template <Stored S, int H>
void ScoreTile(const ScoreArgs& args) {
  for (int part = 0; part < 4; ++part) {
    if (args.keys->rows[part] != nullptr) {
      ScoreTokens<S, H>(args, part);
    }
  }
}

template <Stored S, int H, int Groups>
TM_HD void AddGroups(const ValueArgs& args, int group) {
  const ValueReader<S> reader;
  const TileSide& values = *args.values;
  F32x16 o[H][Groups];
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) {
      o[h][g] = Mul(Load(args.o + h * args.head_dim + 16 * (group + g)), Set1(args.old[h]));
    }
  }
  for (int part = args.begin / 16; part * 16 < args.end; ++part) {
    const uint8_t* rows = values.rows[part];
    const uint8_t* next = values.next[part] + group * LinesPerGroup(S) * 64;
    const int first = args.begin > part * 16 ? args.begin : part * 16;
    const int last = args.end < part * 16 + 16 ? args.end : part * 16 + 16;
    for (int token = first; token < last; ++token) {
      const uint8_t* row = rows + (token - part * 16) * values.stride;
      constexpr int kLines = (Groups * LinesPerGroup(S) + 15) / 16;
      Unroll<kLines>([&](auto line) __attribute__((always_inline)) {
        PrefetchLine(next, (token - part * 16) * kLines + decltype(line)::value);
      });
#pragma GCC unroll 4
      for (int g = 0; g < Groups; ++g) {
        const F32x16 value = reader.Read(row, group + g, values.meta, token);
#pragma GCC unroll 8
        for (int h = 0; h < H; ++h) {
          o[h][g] = Fma(Set1(args.weights[h * kTileTokens + token]), value, o[h][g]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int g = 0; g < Groups; ++g) {
      Store(args.o + h * args.head_dim + 16 * (group + g), o[h][g]);
    }
  }
}

// Computes o = o * correction + Σ weight · v, with the tokens in order.
template <Stored S, int H>
void AddValues(const ValueArgs& args) {
  constexpr int kGroups = H <= 4 ? 4 : 2;
  const int num_groups = args.head_dim / 16;
  int group = 0;
  for (; group + kGroups <= num_groups; group += kGroups) {
    AddGroups<S, H, kGroups>(args, group);
  }
  for (; group < num_groups; ++group) {
    AddGroups<S, H, 1>(args, group);
  }
}

}  // namespace turbomind::TM_ISA
