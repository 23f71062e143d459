#pragma once

// ⑦ Prefill over FP4 codes on AMX tiles. The sums are exact, as in prefill_attention_integer.h, so
// the bits are the same. A register of sums is 16 rows of queries by 16 tokens or 16 dimensions.
//
// Scores: a query's 16 bits are two BF16 numbers side by side, 256 * high and low. The codes of 16
// dimensions are stored twice, one copy below the other, so that one product of 32 gives a group's
// sum. |Σ| <= 16 * 12 * 32767 < 2^24 is exact in FP32.
// Values: a weight's 16 bits are two unsigned bytes with separate tiles of sums. One product covers
// all 64 tokens of a tile.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/tiles.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"

namespace turbomind::TM_ISA {

inline constexpr int kScoreGroups = 4;  // groups whose sums are computed together

// E2M1 values times two, as BF16.
alignas(64) inline constexpr uint16_t kDoubledE2m1Bf16[16] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140,
    0x0000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};

struct UpperHalves {
  alignas(64) uint16_t from[32];
};
constexpr UpperHalves MakeUpperHalves() {
  UpperHalves halves = {};
  for (int i = 0; i < 32; ++i) {
    halves.from[i] = static_cast<uint16_t>(2 * i + 1);
  }
  return halves;
}
inline constexpr UpperHalves kUpperHalves = MakeUpperHalves();

// Splits the queries that are rounded for the quantized pool into b.halves: for each row and group
// bf16[2][16], in the order of the pairs.
inline void SplitQueries(const Block& b) {
  const __m512i upper = _mm512_load_si512(kUpperHalves.from);
  const int groups = b.rows * b.head_dim / 16;
  for (int i = 0; i < groups; ++i) {
    const __m256i shorts =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.rounded[0].pairs + i * kGroupPairs));
    const __m512i q = _mm512_maskz_cvtepi16_epi32(0xffff, shorts);
    const __m512i high =
        _mm512_slli_epi32(_mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8), 8);
    const __m512 high_float = _mm512_maskz_cvtepi32_ps(0xffff, high);
    const __m512 low_float = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(q, high));
    _mm512_store_si512(b.halves + i * 16,
                       _mm512_permutex2var_epi16(_mm512_castps_si512(high_float), upper,
                                                 _mm512_castps_si512(low_float)));
  }
}

// Unpacks codes to b.keys: for each group of 16 dimensions and run of 16 tokens bf16[2][8][16
// tokens][2], with two equal halves.
inline void UnpackKeysForTiles(const Block& b) {
  const ShortTable table = LoadShortTable(reinterpret_cast<const int16_t*>(kDoubledE2m1Bf16));
  const TileSide& side = b.side[0];
  auto* keys = reinterpret_cast<uint8_t*>(b.keys);
  for (int part = 0; part < 4; ++part) {
    if (side.rows[part] == nullptr) {
      continue;
    }
    for (int base = 0; base < b.head_dim; base += 32) {
      I32x16 words[4];
      LoadTransposed(side.rows[part] + base / 2, side.stride, words);
      Unroll<16>([&](auto index) __attribute__((always_inline)) {
        constexpr int j = decltype(index)::value;
        if (j < kGroupPairs || base + 16 < b.head_dim) {  // else this is part of the next row
          const int group = base / 16 + j / kGroupPairs;
          uint8_t* to = keys + (group * 4 + part) * kTileRegister + j % kGroupPairs * 64;
          const I32x16 pairs = KeyPairs<Stored::kFp4, j>(words, table);
          StoreInt(to, pairs);
          StoreInt(to + kTileRegister / 2, pairs);
        }
      });
    }
  }
}

// FP32 or int32 sums of one register.
struct RegisterSums {
  alignas(64) int32_t of[kRegisterRows * 16];
};

// Computes the sums of groups [group, group + N) in registers 0 to N - 1, for 16 rows and one run
// of tokens.
template <int N>
TM_HD void SumScores(const Block& b, int row, int group, int part) {
  const float* queries = b.halves + (row * b.head_dim / 16 + group) * 16;
  const uint8_t* keys =
      reinterpret_cast<const uint8_t*>(b.keys) + (group * 4 + part) * kTileRegister;
  const int64_t stride = int64_t{4} * b.head_dim;
  Unroll<N>([&](auto g) __attribute__((always_inline)) {
    constexpr int i = decltype(g)::value;
    LoadTile<4 + i % 2>(queries + 16 * i, stride);
    LoadTile<6 + i % 2>(keys + 4 * kTileRegister * i, 64);
    ZeroTile<i>();
    DotBf16<i, 4 + i % 2, 6 + i % 2>();
  });
}

template <int N>
TM_HD void StoreScoreSums(RegisterSums (&sums)[kScoreGroups]) {
  Unroll<N>([&](auto g) __attribute__((always_inline)) {
    StoreTile<decltype(g)::value>(sums[decltype(g)::value].of, 64);
  });
}

template <int N>
TM_HD void ScaleScores(const Block& b, int row, int group, int part,
                       const RegisterSums (&sums)[kScoreGroups]) {
  const float* meta = b.side[0].meta + group * kTileTokens + 16 * part;
  F32x16 scale[N];
  Unroll<N>([&](auto g) __attribute__((always_inline)) {
    scale[decltype(g)::value] = Load(meta + decltype(g)::value * kTileTokens);
  });
  float* scores = b.scores + row * kTileTokens + 16 * part;
  const int rows = MinOf(kRegisterRows, b.rows - row);
  for (int r = 0; r < rows; ++r, scores += kTileTokens) {
    F32x16 score = group == 0 ? Zero() : Load(scores);
    Unroll<N>([&](auto g) __attribute__((always_inline)) {
      constexpr int i = decltype(g)::value;
      const auto* sum = reinterpret_cast<const float*>(sums[i].of + 16 * r);
      score = Fma(Load(sum), scale[i], score);
    });
    Store(scores, score);
  }
}

// Computes the groups [group, group + N) for all rows and tokens. The sums of one register are
// scaled while the next ones are computed.
template <int N>
void ScoreGroups(const Block& b, int group) {
  RegisterSums sums[2][kScoreGroups];
  const int steps = (b.rows + kRegisterRows - 1) / kRegisterRows * 4;
  const auto row_of = [](int step) { return step / 4 * kRegisterRows; };
  SumScores<N>(b, 0, group, 0);
  for (int step = 0; step < steps; ++step) {
    StoreScoreSums<N>(sums[step % 2]);
    if (step + 1 < steps) {
      SumScores<N>(b, row_of(step + 1), group, (step + 1) % 4);
    }
    ScaleScores<N>(b, row_of(step), group, step % 4, sums[step % 2]);
  }
}

inline void ScoreTileOnTiles(const Block& b) {
  const int groups = b.head_dim / 16;
  int group = 0;
  for (; group + 4 <= groups; group += 4) {
    ScoreGroups<4>(b, group);
  }
  for (; group < groups; ++group) {
    ScoreGroups<1>(b, group);
  }
}

// The permutation from 8 bytes each of 4 tokens to [16 dimensions][4 tokens], before the nibbles
// are selected.
struct ValueOrder {
  alignas(64) uint8_t from[64];
};
constexpr ValueOrder MakeValueOrder() {
  ValueOrder order = {};
  for (int i = 0; i < 64; ++i) {
    order.from[i] = static_cast<uint8_t>(8 * (i % 4) + i / 8);
  }
  return order;
}
inline constexpr ValueOrder kValueOrder = MakeValueOrder();
alignas(16) inline constexpr int8_t kDoubledE2m1Bytes[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                             0, -1, -2, -3, -4, -6, -8, -12};

TM_HD int64_t LoadEight(const uint8_t* p) {
  int64_t bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return bytes;
}

// Unpacks codes to b.values: for each group int8[16][16 dimensions][4 tokens]. Row 4 * i + j holds
// the tokens from 16 * j + 4 * i on, in the order of RoundWeightsForTiles.
inline void UnpackValuesForTiles(const Block& b) {
  const __m512i order = _mm512_load_si512(kValueOrder.from);
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kDoubledE2m1Bytes)));
  constexpr __mmask64 kOddDimensions = 0xf0f0f0f0f0f0f0f0u;
  const TileSide& side = b.side[1];
  auto* values = reinterpret_cast<uint8_t*>(b.values);
  for (int part = 0; part < 4; ++part) {
    if (side.rows[part] == nullptr) {
      continue;
    }
    for (int quad = 0; quad < 4; ++quad) {
      const uint8_t* row = side.rows[part] + 4 * quad * side.stride;
      uint8_t* to = values + (4 * quad + part) * 64;
      for (int group = 0; group < b.head_dim / 16; ++group) {
        const uint8_t* from = row + 8 * group;
        const __m256i four = _mm256_setr_epi64x(LoadEight(from), LoadEight(from + side.stride),
                                                LoadEight(from + 2 * side.stride),
                                                LoadEight(from + 3 * side.stride));
        const __m512i bytes = _mm512_permutexvar_epi8(order, _mm512_castsi256_si512(four));
        const __m512i nibbles =
            _mm512_mask_blend_epi8(kOddDimensions, bytes, _mm512_srli_epi16(bytes, 4));
        _mm512_store_si512(to + group * kTileRegister, _mm512_permutexvar_epi8(nibbles, table));
      }
    }
  }
}

// The weights of 16 rows as unsigned bytes: for each row and group, the high bytes of 64 tokens,
// then the low ones.
struct TileWeights {
  alignas(64) uint8_t bytes[kRegisterRows][kMaxHeadDim / 16][2 * kTileTokens];
  float f[kRegisterRows][kMaxHeadDim / 16];  // TileFactors: f * tile
};

// Computes int16(weight * r) of a row like RoundWeights, split into high and low bytes.
TM_HD void RoundWeightsForTiles(const float* weights, const ValueScales& scales, int groups,
                                uint8_t (*to)[2 * kTileTokens]) {
  F32x16 w[4];
  Unroll<4>([&](auto i) __attribute__((always_inline)) {
    w[decltype(i)::value] = Load(weights + 16 * decltype(i)::value);
  });
  const __m512i low = _mm512_set1_epi16(0xff);
  for (int group = 0; group < groups; ++group) {
    const float* r = scales.r + group * kTileTokens;
    I32x16 code[4];
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int k = decltype(i)::value;
      code[k] = ToInt(Mul(w[k], Load(r + 16 * k)));
    });
    const __m512i first = _mm512_packus_epi32(code[0].v, code[1].v);
    const __m512i second = _mm512_packus_epi32(code[2].v, code[3].v);
    _mm512_store_si512(
        to[group], _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8)));
    _mm512_store_si512(to[group] + kTileTokens, _mm512_packus_epi16(_mm512_and_si512(first, low),
                                                                    _mm512_and_si512(second, low)));
  }
}

// Computes the sums of 16 rows and one group in the registers S (high) and S + 1 (low).
template <int S>
TM_HD void SumValues(const Block& b, const TileWeights& weights, int group) {
  constexpr int64_t kStride = sizeof(weights.bytes[0]);
  LoadTile<6 + S / 2>(reinterpret_cast<const uint8_t*>(b.values) + group * kTileRegister, 64);
  LoadTile<4>(weights.bytes[0][group], kStride);
  ZeroTile<S>();
  DotUnsigned<S, 4, 6 + S / 2>();
  LoadTile<5>(weights.bytes[0][group] + kTileTokens, kStride);
  ZeroTile<S + 1>();
  DotUnsigned<S + 1, 5, 6 + S / 2>();
}

TM_HD void AddSums(const Block& b, const TileWeights& weights, int row, int group,
                   const RegisterSums (&sums)[2]) {
  const int rows = MinOf(kRegisterRows, b.rows - row);
  const int64_t stride = b.head_dim;
  const float* old = b.old + row;
  float* o = b.o + row * stride + 16 * group;
  for (int r = 0; r < rows; ++r, o += stride) {
    const I32x16 sum =
        Add(ShiftLeft<8>(LoadInt(sums[0].of + 16 * r)), LoadInt(sums[1].of + 16 * r));
    // This is AddTile with f * tile already multiplied.
    Store(o, Fma(ToFloat(sum), Set1(weights.f[r][group]), Mul(Load(o), Set1(old[r]))));
  }
}

// Adds all groups of the 16 rows from `row` on.
TM_HD void AddRowsOnTiles(const Block& b, const TileWeights& weights, int row) {
  RegisterSums sums[2][2];
  const int groups = b.head_dim / 16;
  SumValues<0>(b, weights, 0);
  const auto step = [&]<int S>(int group) __attribute__((always_inline)) {
    if (group + 1 < groups) {
      SumValues<2 - S>(b, weights, group + 1);
    }
    StoreTile<S>(sums[S / 2][0].of, 64);
    StoreTile<S + 1>(sums[S / 2][1].of, 64);
    if (group > 0) {
      AddSums(b, weights, row, group - 1, sums[1 - S / 2]);
    }
  };
  int group = 0;
  for (; group + 2 <= groups; group += 2) {
    step.template operator()<0>(group);
    step.template operator()<2>(group + 1);
  }
  if (group < groups) {
    step.template operator()<0>(group);
    AddSums(b, weights, row, group, sums[0]);
  } else {
    AddSums(b, weights, row, group - 1, sums[1]);
  }
}

inline void AddTileValuesOnTiles(const Block& b, const View& view, int tile, const Seen& any) {
  UnpackValuesForTiles(b);
  ValueScales shared;
  ValueScales own;
  FillValueScales<Stored::kFp4>(b.side[1].meta, b.head_dim, any.begin, any.end, &shared);
  const int groups = b.head_dim / 16;
  const bool all = AllSeeAll(b, view, tile);
  TileWeights weights;
  for (int row = 0; row < b.rows; row += kRegisterRows) {
    const int rows = MinOf(kRegisterRows, b.rows - row);
    for (int r = 0; r < rows; ++r) {
      const ValueScales* scales = &shared;
      if (!all) {
        const Seen seen = SeenByRow(b, view, tile, row + r);
        if (seen.begin != any.begin || seen.end != any.end) {
          FillValueScales<Stored::kFp4>(b.side[1].meta, b.head_dim, seen.begin, seen.end, &own);
          scales = &own;
        }
      }
      RoundWeightsForTiles(b.scores + (row + r) * kTileTokens, *scales, groups, weights.bytes[r]);
      for (int group = 0; group < groups; ++group) {
        weights.f[r][group] = scales->f[group] * b.tile[row + r];
      }
    }
    AddRowsOnTiles(b, weights, row);
  }
}

}  // namespace turbomind::TM_ISA
