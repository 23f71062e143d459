#pragma once

// ⑦ Prefill in FP32. A tile of the cache is dequantized into scratch: keys transposed and unscaled,
// values scaled. Each row then runs the same operations in the same order as decode.
//
// Compute bound: each pass keeps kRows × 4 registers of sums, 24 FMAs for 10 loads with AVX-512.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"

namespace turbomind::TM_ISA {

template <Stored S>
void UnpackKeys(const Block& b) {
  const Table16 table = NibbleTable < BitsOf(S) == 4 ? S : Stored::kFp4 > ();
  const TileSide& side = b.side[0];
  for (int part = 0; part < 4; ++part) {
    if (side.rows[part] == nullptr) {
      continue;
    }
    for (int base = 0; base < b.head_dim; base += PieceDims(S)) {
      I32x16 words[4];
      LoadTransposed(side.rows[part] + base * BitsOf(S) / 8, side.stride, words);
      float* keys = b.keys + base * kTileTokens + 16 * part;
      Unroll<PieceDims(S)>([&](auto index) __attribute__((always_inline)) {
        constexpr int j = decltype(index)::value;
        if (j < 16 || base + 16 < b.head_dim) {  // else this is part of the next row
          Store(keys + j * kTileTokens, KeyLane<S>(words, j, table));
        }
      });
    }
  }
}

// Unpacks the tokens [begin, end) of the tile. Returns true if all values are finite.
template <Stored S>
bool UnpackValues(const Block& b, int begin, int end) {
  const ValueReader<S> reader;
  const TileSide& side = b.side[1];
  I32x16 largest = Set1Int(0);
  for (int token = begin; token < end; ++token) {
    const uint8_t* row = side.rows[token / 16] + (token % 16) * side.stride;
    for (int group = 0; group < b.head_dim / 16; ++group) {
      const F32x16 value = reader.Read(row, group, side.meta, token);
      largest = MaxInt(largest, And(Bits(value), Set1Int(0x7fffffff)));
      Store(b.values + token * b.head_dim + 16 * group, value);
    }
  }
  return Count(Less(largest, Set1Int(0x7f800000))) == kLanes;
}

// Computes the scores of R rows and C columns of 16 tokens. Each sum has the order of decode.
template <bool kGrouped, bool kAffine, int R, int C>
TM_HD void ScoreRows(const Block& b, int row, int column) {
  const float* meta = b.side[0].meta + column;
  float* scores = b.scores + row * kTileTokens + column;
  const float* q = b.q + row * b.head_dim;
  for (int group = 0; group < b.head_dim / 16; ++group) {
    F32x16 sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        sum[r][c] = Zero();
      }
    }
    const float* keys = b.keys + group * 16 * kTileTokens + column;
#pragma GCC unroll 2
    for (int d = 0; d < 16; ++d) {
      F32x16 key[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        key[c] = Load(keys + d * kTileTokens + 16 * c);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F32x16 x = Set1(q[r * b.head_dim + group * 16 + d]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          sum[r][c] = Fma(key[c], x, sum[r][c]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        float* at = scores + r * kTileTokens + 16 * c;
        const F32x16 total = group == 0 ? Zero() : Load(at);
        Store(at, kGrouped ? Fma(sum[r][c], Load(meta + group * kTileTokens + 16 * c), total)
                           : Add(total, sum[r][c]));
      }
    }
  }
  if (kAffine) {
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        float* at = scores + r * kTileTokens + 16 * c;
        const F32x16 zero = Mul(Load(meta + kTileTokens + 16 * c), Set1(b.qsum[row + r]));
        Store(at, Fma(Load(meta + 16 * c), Load(at), zero));
      }
    }
  }
}

template <bool kGrouped, bool kAffine>
void ScoreTile(const Block& b) {
  for (int column = 0; column < kTileTokens; column += 16 * kColumns) {
    int row = 0;
    for (; row + kRows <= b.rows; row += kRows) {
      ScoreRows<kGrouped, kAffine, kRows, kColumns>(b, row, column);
    }
    for (; row < b.rows; ++row) {
      ScoreRows<kGrouped, kAffine, 1, kColumns>(b, row, column);
    }
  }
}

// Computes o = o * correction + Σ weight · v over the tokens [begin, end) of the tile.
template <int R, int G>
TM_HD void AddRows(const Block& b, int row, int group, int begin, int end) {
  float* out = b.o + row * b.head_dim + 16 * group;
  const float* weights = b.scores + row * kTileTokens;
  F32x16 o[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      o[r][g] = Mul(Load(out + r * b.head_dim + 16 * g), Set1(b.old[row + r]));
    }
  }
  for (int token = begin; token < end; ++token) {
    const float* from = b.values + token * b.head_dim + 16 * group;
    F32x16 value[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      value[g] = Load(from + 16 * g);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 weight = Set1(weights[r * kTileTokens + token]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        o[r][g] = Fma(weight, value[g], o[r][g]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      Store(out + r * b.head_dim + 16 * g, o[r][g]);
    }
  }
}

template <int R>
void AddRowsAllDims(const Block& b, int row, int begin, int end) {
  const int num_groups = b.head_dim / 16;
  int group = 0;
  for (; group + kColumns <= num_groups; group += kColumns) {
    AddRows<R, kColumns>(b, row, group, begin, end);
  }
  for (; group < num_groups; ++group) {
    AddRows<R, 1>(b, row, group, begin, end);
  }
}

template <Stored S>
void AddTileValues(const Block& b, const View& view, int tile, const Seen& any) {
  const bool all_finite = UnpackValues<S>(b, any.begin, any.end);
  for (int token = any.begin; view.interleave && token < any.end; ++token) {
    InterleaveRow(b.values + token * b.head_dim, b.head_dim);
  }
  int row = 0;
  // A hidden token has weight 0 and leaves a sum unchanged, unless its value is NaN or infinite.
  for (; all_finite && row + kRows <= b.rows; row += kRows) {
    AddRowsAllDims<kRows>(b, row, any.begin, any.end);
  }
  for (; row < b.rows; ++row) {
    const Seen seen = SeenByRow(b, view, tile, row);
    if (seen.begin < seen.end) {
      AddRowsAllDims<1>(b, row, seen.begin, seen.end);
    }
  }
}

}  // namespace turbomind::TM_ISA
