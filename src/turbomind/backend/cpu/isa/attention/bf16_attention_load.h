#pragma once

// ⑦ Unpacks a tile of the cache to BF16, as the tile registers multiply it.
//
// Keys: scores are as exact as if keys had 16 significant bits. Codes of 8 and 4 bits are exact:
// E2M1 times its scale has 6 bits, and the codes of int8 and int4 stay without their scales, which
// are applied to the scores. FP16 and FP32 keys are sums of two BF16 numbers.
// Values: all scales are inside. FP16, FP32, int8 and int4 are rounded to nearest even.
//
// A hidden token has weight 0 and must have a finite value, because 0 · NaN is NaN. Tokens that no
// row sees are therefore zero. A value that is not below kValueLimit makes its token unfit: it is
// zero here, too, and the rows that see it add it in FP32.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_integer.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"

namespace turbomind::TM_ISA {

inline constexpr int kStepDims = 32;  // dimensions of one product of registers
inline constexpr float kValueLimit = 0x1p64f;

// Returns true if each scaled value is a BF16 number.
constexpr bool IsBf16(Stored s) {
  return s == Stored::kBF16 || s == Stored::kE4m3 || s == Stored::kE5m2 || s == Stored::kFp4;
}

constexpr bool HasScales(Stored s) { return IsGrouped(s) || IsAffine(s); }

// Returns the number of BF16 numbers whose sum is a key.
constexpr int KeyParts(Stored s) { return s == Stored::kF16 || s == Stored::kF32 ? 2 : 1; }

struct JoinOrder {
  alignas(64) uint16_t from[32];
};
constexpr JoinOrder MakeJoinOrder() {
  JoinOrder order = {};
  for (int i = 0; i < 32; ++i) {
    order.from[i] = static_cast<uint16_t>(i % 2 * 16 + i / 2);
  }
  return order;
}
inline constexpr JoinOrder kJoinOrder = MakeJoinOrder();

// Returns `low` in the low halves of the lanes and `high` in the high halves. REQUIRES: both are
// BF16 numbers.
TM_HD I32x16 JoinExact(F32x16 low, F32x16 high) {
  return Or(ShiftRight<16>(Bits(low)), Bits(high));
}

// The same for numbers that are rounded. They become what the rounding left over.
TM_HD I32x16 JoinRounded(F32x16& low, F32x16& high) {
  const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
  const I32x16 joined = {_mm512_permutexvar_epi16(_mm512_load_si512(kJoinOrder.from), rounded)};
  low = Sub(low, FromBits(ShiftLeft<16>(joined)));
  high = Sub(high, FromBits(And(joined, Set1Int(static_cast<int32_t>(0xffff0000u)))));
  return joined;
}

// Some dimensions of 16 keys, a multiple of 8.
template <Stored S>
struct KeyPiece {
  static constexpr int kDims = PieceDims(S) > 8 ? PieceDims(S) : 8;
  I32x16 words[kDims / PieceDims(S)][4];

  TM_HD KeyPiece(const uint8_t* rows, int64_t stride) {
    for (int i = 0; i < kDims / PieceDims(S); ++i) {
      LoadTransposed(rows + 16 * i, stride, words[i]);
    }
  }
  TM_HD F32x16 Lane(int j, const Table16& table) const {
    return KeyLane<S>(words[j / PieceDims(S)], j % PieceDims(S), table);
  }
};

// The keys in b.keys are bf16[KeyParts][steps of 32 dimensions][4 runs][16 pairs][16 tokens][2].
// Pair 4 i + k of a step has the dimensions 8 i + k and 8 i + k + 4, as the nibbles of a dword lie.
TM_HD int StepsOf(const Block& b) { return (b.head_dim + kStepDims - 1) / kStepDims; }
TM_HD int64_t KeyPartBytes(const Block& b) { return int64_t{4} * StepsOf(b) * kTileRegister; }
TM_HD uint8_t* KeyRegister(const Block& b, int part, int step, int run) {
  return reinterpret_cast<uint8_t*>(b.keys) + part * KeyPartBytes(b) +
         (4 * step + run) * kTileRegister;
}

// Stores a pair of dimensions of 16 keys. `scale` points to their scales if they have groups.
template <Stored S>
TM_HD void StoreKeys(F32x16 low, F32x16 high, const float* scale, uint8_t* to, int64_t part_bytes) {
  if constexpr (IsGrouped(S)) {
    StoreInt(to, JoinExact(Mul(low, Load(scale)), Mul(high, Load(scale))));
  } else if constexpr (KeyParts(S) == 1) {
    StoreInt(to, JoinExact(low, high));
  } else {
    StoreInt(to, JoinRounded(low, high));
    StoreInt(to + part_bytes, JoinRounded(low, high));
  }
}

template <Stored S>
void UnpackKeysBf16(const Block& b) {
  const Table16 table = NibbleTable < BitsOf(S) == 4 ? S : Stored::kFp4 > ();
  const TileSide side = b.side[0];
  const int head_dim = b.head_dim;
  const int64_t part_bytes = KeyPartBytes(b);
  for (int run = 0; run < 4; ++run) {
    if (side.rows[run] == nullptr) {
      continue;
    }
    uint8_t* const keys = KeyRegister(b, 0, 0, run);
    for (int base = 0; base < head_dim; base += KeyPiece<S>::kDims) {
      const KeyPiece<S> piece(side.rows[run] + base * BitsOf(S) / 8, side.stride);
      Unroll<KeyPiece<S>::kDims / 8>([&](auto index) __attribute__((always_inline)) {
        constexpr int first = 8 * decltype(index)::value;
        const int dim = base + first;
        if (first < 16 || dim < head_dim) {  // else this is part of the next row
          const float* scale = side.meta + dim / 16 * kTileTokens + 16 * run;
          uint8_t* to = keys + dim / kStepDims * 4 * kTileRegister + dim % kStepDims / 2 * 64;
          Unroll<4>([&](auto k) __attribute__((always_inline)) {
            constexpr int j = first + decltype(k)::value;
            StoreKeys<S>(piece.Lane(j, table), piece.Lane(j + 4, table), scale,
                         to + 64 * decltype(k)::value, part_bytes);
          });
        }
      });
    }
  }
}

// Returns nibble i in the low bits of lane i. The bits above are undefined.
TM_HD I32x16 LoadNibbles(const uint8_t* p) {
  int64_t nibbles;
  __builtin_memcpy(&nibbles, p, sizeof(nibbles));
  // The start bit of each byte. Qword i holds the lanes 2 i and 2 i + 1.
  const __m512i from = _mm512_setr_epi64(0x0000000400000000, 0x0000000c00000008, 0x0000001400000010,
                                         0x0000001c00000018, 0x0000002400000020, 0x0000002c00000028,
                                         0x0000003400000030, 0x0000003c00000038);
  return {_mm512_multishift_epi64_epi8(from, _mm512_set1_epi64(nibbles))};
}

// One value row. `meta` points to the scale of its token.
struct ValueRow {
  const uint8_t* bytes = nullptr;
  const float* meta = nullptr;

  TM_HD static ValueRow Of(const TileSide& side, int token) {
    return {side.rows[token / 16] + token % 16 * side.stride, side.meta + token};
  }
};

// Reads 16 dimensions of one value in their order.
template <Stored S>
TM_HD F32x16 ReadValues(const ValueReader<S>& reader, const ValueRow& row, int group) {
  if constexpr (BitsOf(S) == 4) {
    const F32x16 code = Lookup(reader.table, LoadNibbles(row.bytes + 8 * group));
    if constexpr (IsAffine(S)) {
      return Fma(code, Set1(row.meta[0]), Set1(row.meta[kTileTokens]));
    } else {
      return Mul(code, Set1(row.meta[group * kTileTokens]));
    }
  } else {
    return reader.Read(row.bytes, group, row.meta, 0);
  }
}

// Accumulates magnitudes in two chains. A sum of squares is infinite or NaN if a number is not
// below 2^64.
struct Magnitudes {
  F32x16 sum[2] = {Zero(), Zero()};

  TM_HD void Add(F32x16 first, F32x16 second) {
    sum[0] = Fma(first, first, sum[0]);
    sum[1] = Fma(second, second, sum[1]);
  }
  TM_HD bool AllBelowLimit() const {
    const F32x16 infinity = Set1(__builtin_inff());
    return Count(Less(sum[0], infinity)) + Count(Less(sum[1], infinity)) == 2 * kLanes;
  }
};

// Returns true if the scales of the tokens in `seen` are so small that all values fit. A value is
// at most 255 scales and a zero point.
template <Stored S>
TM_HD bool ScalesFit(const Block& b, const Seen& seen) {
  Magnitudes magnitudes;
  const int rows = IsGrouped(S) ? b.head_dim / 16 : 2;
  for (int row = 0; row < rows; ++row) {
    const float* scales = b.side[1].meta + row * kTileTokens;
    for (int i = 0; i < 4; i += 2) {
      magnitudes.Add(Mul(SeenScales(scales, i, seen), Set1(1024.f)),
                     Mul(SeenScales(scales, i + 1, seen), Set1(1024.f)));
    }
  }
  return magnitudes.AllBelowLimit();
}

// The values in b.values are bf16[groups of 16 dimensions][2 steps][16 pairs of tokens][16][2].
TM_HD uint8_t* ValueRegister(const Block& b, int group, int step) {
  return reinterpret_cast<uint8_t*>(b.values) + (2 * group + step) * kTileRegister;
}

// Unpacks a pair of tokens, of which those that no row sees become zero.
template <Stored S, bool kLow, bool kHigh>
TM_HD void UnpackPair(const ValueReader<S>& reader, const ValueRow (&rows)[2], int groups,
                      uint8_t* to, Magnitudes& magnitudes) {
  for (int group = 0; group < groups; ++group, to += 2 * kTileRegister) {
    F32x16 low = kLow ? ReadValues<S>(reader, rows[0], group) : Zero();
    F32x16 high = kHigh ? ReadValues<S>(reader, rows[1], group) : Zero();
    if constexpr (!HasScales(S)) {
      magnitudes.Add(low, high);
    }
    StoreInt(to, IsBf16(S) ? JoinExact(low, high) : JoinRounded(low, high));
  }
}

// Unpacks the tokens in `seen`; the others become zero. Returns false if one may be unfit.
template <Stored S>
bool UnpackValuesBf16(const Block& b, const Seen& seen) {
  const ValueReader<S> reader;
  const TileSide side = b.side[1];
  const Seen range = seen;
  const int groups = b.head_dim / 16;
  Magnitudes magnitudes;
  for (int token = 0; token < kTileTokens; token += 2) {
    uint8_t* to = ValueRegister(b, 0, token / 32) + token % 32 / 2 * 64;
    const bool low = range.begin <= token && token < range.end;
    const bool high = range.begin <= token + 1 && token + 1 < range.end;
    const ValueRow rows[2] = {low ? ValueRow::Of(side, token) : ValueRow(),
                              high ? ValueRow::Of(side, token + 1) : ValueRow()};
    if (low && high) {
      UnpackPair<S, true, true>(reader, rows, groups, to, magnitudes);
    } else if (low) {
      UnpackPair<S, true, false>(reader, rows, groups, to, magnitudes);
    } else if (high) {
      UnpackPair<S, false, true>(reader, rows, groups, to, magnitudes);
    } else {
      UnpackPair<S, false, false>(reader, rows, groups, to, magnitudes);
    }
  }
  return HasScales(S) ? ScalesFit<S>(b, range) : magnitudes.AllBelowLimit();
}

// Reads one value as FP32. Returns true if it fits.
template <Stored S>
bool ReadValueRow(const Block& b, int token, float* row) {
  const ValueReader<S> reader;
  bool fits = true;
  for (int group = 0; group < b.head_dim / 16; ++group) {
    const F32x16 value = ReadValues<S>(reader, ValueRow::Of(b.side[1], token), group);
    const F32x16 magnitude = FromBits(And(Bits(value), Set1Int(0x7fffffff)));
    fits = fits && Count(Less(magnitude, Set1(kValueLimit))) == kLanes;
    Store(row + 16 * group, value);
  }
  return fits;
}

}  // namespace turbomind::TM_ISA
