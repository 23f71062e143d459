#pragma once

// Conversion of stored weights to operands of the tensor cores: BF16, exact for every code. Scales
// are kept separately in FP32, except with kProducts.
//
// WeightFragments<F> has
//   kBlocks    blocks of 32 columns per unit
//   kScaled    values are codes that Scale multiplies; if SplitsColumns, part 0 or 1 of a block
//   kMinimum   Minimum is added as well
//   kProducts  values are products of codes and scales, which are exact in BF16
//   Unit       a lane's (4 g + t) part of a unit: 8 columns of every block, of 2 outputs
//   Load       loads a unit from a tile
//   Copy       starts to copy a unit into kStagedBytes of shared memory (cp.async)
//   LoadStaged loads a unit from there
//   Expand     block → pairs[half][p]: columns c + 2 p and the next, of the output g + 8 half,
//              where c is FirstCol
//   ExpandCodes, Scale   with kProducts: the codes, and the scale of the lane's columns
// A weight is its value times the factor of the matrix (cuda_matrix.h).

#include <cstdint>

#include "turbomind/backend/cuda/linear/matrix_layout.h"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {

inline constexpr uint32_t kBFloatOne = 0x3f803f80u;
inline constexpr uint32_t kBFloatMinusZero = 0x80008000u;  // as a summand, keeps the sign of zero
inline constexpr uint32_t kBFloat128 = 0x43004300u;        // bits 0..6 count in units of 1
inline constexpr uint32_t kBFloatMinus128 = 0xc300c300u;
inline constexpr uint32_t kBFloatMinus136 = 0xc308c308u;
inline constexpr uint32_t kBFloatMinus160 = 0xc320c320u;

// Convert eight codes of 4 + kBits bits to codes + 128 + offset. Pair p has its lower four bits at
// 4 p of the two halves of the word, and the others at first + kBits p of those of `upper`.
template <int kBits>
TM_DEVICE void ExpandInt(uint32_t word, uint32_t upper, int first, uint32_t offset,
                         uint32_t (&out)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    uint32_t codes = AndOr(word >> (4 * p), 0x000f000fu, kBFloat128);
    if constexpr (kBits > 0) {
      constexpr uint32_t kMask = kBits == 1 ? 0x00100010u : 0x00300030u;
      const int at = first + kBits * p - 4;
      codes = AndOr(at < 0 ? upper << -at : upper >> at, kMask, codes);
    }
    out[p] = FmaBFloat2(codes, kBFloatOne, offset);
  }
}

// Convert four signed codes, with the pairs in bytes (0, 2) and (1, 3). The result is 128 + the low
// 7 bits, minus 128, or minus 256 if the sign is set.
TM_DEVICE void ExpandInt8(uint32_t word, uint32_t* out) {
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const uint32_t codes = word >> (8 * p);
    out[p] = FmaBFloat2(AndOr(codes, 0x007f007fu, kBFloat128), kBFloatOne,
                        AndOr(codes, 0x00800080u, kBFloatMinus128));
  }
}

// Convert eight E2M1 codes. Shifts move a code's bits to BF16's sign, two exponent bits and one
// mantissa bit. That is the value times 2^-126, which the product with `factor` normalizes.
inline constexpr uint32_t k2To126 = 0x7e807e80u;
TM_DEVICE void ExpandE2m1(uint32_t word, uint32_t factor, uint32_t (&out)[4]) {
  constexpr uint32_t kSign = 0x80008000u;
  constexpr uint32_t kLow = 0x01c001c0u;
  out[0] = word & (kSign | kLow);
  out[1] = (word << 3) & (kSign | kLow);
  out[2] = AndOr(word << 2, kSign, (word << 6) & kLow);
  out[3] = AndOr(word << 1, kSign, (word >> 3) & kLow);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    out[p] = FmaBFloat2(out[p], factor, kBFloatMinusZero);
  }
}

// Convert four E4M3 codes. A shift moves a code's seven low bits to BF16's exponent and mantissa.
// That is the value times 2^-120, which one product normalizes.
TM_DEVICE void ExpandE4m3(uint32_t word, uint32_t* out) {
  constexpr uint32_t kSign = 0x80008000u;
  constexpr uint32_t k2To120 = 0x7b807b80u;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const uint32_t codes = SelectBytes(word, 0, p == 0 ? 0x1404 : 0x3424);  // in the high bytes
    out[p] = FmaBFloat2(AndOr(codes >> 4, 0x07f007f0u, codes & kSign), k2To120, kBFloatMinusZero);
  }
}

// Return the first of the 8 columns that lane 4 g + t has of a block, relative to the unit. The
// last four begin SecondCols later. A lane of FP8 has 16 neighboring columns, so that it reads 16
// bytes of a row.
template <MatrixFormat F>
TM_DEVICE int FirstCol(int block, int t) {
  return IsFp8(F) ? 16 * t + 8 * block : kQuantBlock * block + (SplitsColumns(F) ? 4 : 8) * t;
}

template <MatrixFormat F>
struct WeightFragments;

// Loads codes in one access of 16 bytes and scales in one of kScaleBytes, which kScaleLanes lanes
// share.
template <MatrixFormat F>
struct BlockFragments {
  static constexpr int kBlocks = UnitCols(F) / kQuantBlock;
  static constexpr int kScaleLanes = HasHalfScales(F) ? 2 : 4;
  static constexpr int kScaleBytes = 2 * UnitScaleBytes(F) * kScaleLanes / 4;
  static constexpr bool kScaled = true;
  static constexpr bool kMinimum = F == MatrixFormat::kQ4_1;
  static constexpr bool kProducts = false;

  struct Unit {
    Words<16> codes;
    Words<kScaleBytes> scales;
  };

  static TM_DEVICE Unit Load(const char* tile, int unit, int lane, int64_t) {
    const char* at = tile + static_cast<int64_t>(unit) * UnitBytes(F);
    return {LoadGlobalOnce(reinterpret_cast<const Words<16>*>(at + lane * 16)),
            LoadGlobalOnce(reinterpret_cast<const Words<kScaleBytes>*>(at + ScalesOf(lane)))};
  }
  static constexpr int kStagedBytes = UnitBytes(F);
  static TM_DEVICE void Copy(const char* tile, int unit, int lane, int64_t, char* stage) {
    const char* at = tile + static_cast<int64_t>(unit) * UnitBytes(F) + lane * 16;
    CopyAsync(stage + lane * 16, at, 16);
    if (lane < (UnitBytes(F) - kUnitCodeBytes) / 16) {
      CopyAsync(stage + kUnitCodeBytes + lane * 16, at + kUnitCodeBytes, 16);
    }
  }
  static TM_DEVICE Unit LoadStaged(const char* stage, int lane) {
    return {LoadShared<Words<16>>(stage + lane * 16),
            LoadShared<Words<kScaleBytes>>(stage + ScalesOf(lane))};
  }
  static TM_DEVICE int ScalesOf(int lane) {
    return kUnitCodeBytes + lane / kScaleLanes * kScaleBytes;
  }
  static TM_DEVICE float HalfAt(const Unit& unit, int i) {
    return ConvertHalf(unit.scales.v[i / 2] >> (16 * (i % 2)));
  }
  static TM_DEVICE float Scale(const Unit& unit, int block, int half) {
    return HalfAt(unit, 2 * block + half);
  }
  static TM_DEVICE float Minimum(const Unit& unit, int block, int half) {
    return HalfAt(unit, 4 + 2 * block + half);
  }
};

template <>
struct WeightFragments<MatrixFormat::kQ4_0> : BlockFragments<MatrixFormat::kQ4_0> {
  static TM_DEVICE void Expand(const Unit& unit, int block, uint32_t (&pairs)[2][4]) {
    ExpandInt<0>(unit.codes.v[2 * block], 0, 0, kBFloatMinus136, pairs[0]);
    ExpandInt<0>(unit.codes.v[2 * block + 1], 0, 0, kBFloatMinus136, pairs[1]);
  }
};

template <>
struct WeightFragments<MatrixFormat::kQ4_1> : BlockFragments<MatrixFormat::kQ4_1> {
  static TM_DEVICE void Expand(const Unit& unit, int block, uint32_t (&pairs)[2][4]) {
    ExpandInt<0>(unit.codes.v[2 * block], 0, 0, kBFloatMinus128, pairs[0]);
    ExpandInt<0>(unit.codes.v[2 * block + 1], 0, 0, kBFloatMinus128, pairs[1]);
  }
};

template <>
struct WeightFragments<MatrixFormat::kQ8_0> : BlockFragments<MatrixFormat::kQ8_0> {
  static TM_DEVICE void Expand(const Unit& unit, int, uint32_t (&pairs)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ExpandInt8(unit.codes.v[2 * half], pairs[half]);
      ExpandInt8(unit.codes.v[2 * half + 1], pairs[half] + 2);
    }
  }
};

template <>
struct WeightFragments<MatrixFormat::kMxfp4> : BlockFragments<MatrixFormat::kMxfp4> {
  static TM_DEVICE void Expand(const Unit& unit, int block, uint32_t (&pairs)[2][4]) {
    ExpandE2m1(unit.codes.v[2 * block], k2To126, pairs[0]);
    ExpandE2m1(unit.codes.v[2 * block + 1], k2To126, pairs[1]);
  }
  // 2^(e - 127). e = 0 counts as zero (its values are below 2^-124); e = 255 is not finite.
  static TM_DEVICE float Scale(const Unit& unit, int block, int half) {
    const int byte = 2 * block + half;
    const uint32_t bits = byte < 3 ? unit.scales.v[0] << (23 - 8 * byte) : unit.scales.v[0] >> 1;
    return BitsFloat(bits & 0x7f800000u);
  }
};

// A product of a code and a scale has at most 6 significant bits. The factor of the matrix has 2^8
// of them, so that neither the scales times 2^118, which normalize codes, nor the products leave
// the range of BF16.
template <>
struct WeightFragments<MatrixFormat::kNvfp4> : BlockFragments<MatrixFormat::kNvfp4> {
  static constexpr bool kScaled = false;
  static constexpr bool kProducts = true;

  static TM_DEVICE void Expand(const Unit& unit, int block, uint32_t (&pairs)[2][4]) {
    constexpr uint32_t k2To127 = 0x7f007f00u;
    constexpr uint32_t k2To111 = 0x77007700u;
    // The scales of both halves times 2^-120, as in ExpandE4m3.
    uint32_t scales = unit.scales.v[0];
    scales = (block == 0 ? scales << 4 : scales >> 4) & 0x07f007f0u;
    scales = FmaBFloat2(FmaBFloat2(scales, k2To127, kBFloatMinusZero), k2To111, kBFloatMinusZero);
    ExpandE2m1(unit.codes.v[2 * block], SelectBytes(scales, 0, 0x1010), pairs[0]);
    ExpandE2m1(unit.codes.v[2 * block + 1], SelectBytes(scales, 0, 0x3232), pairs[1]);
  }
  static TM_DEVICE void ExpandCodes(const Unit& unit, int block, uint32_t (&pairs)[2][4]) {
    ExpandE2m1(unit.codes.v[2 * block], k2To126, pairs[0]);
    ExpandE2m1(unit.codes.v[2 * block + 1], k2To126, pairs[1]);
  }
  // Times 2^-8: FP16 has the bits of E4M3 with another bias.
  static TM_DEVICE float Scale(const Unit& unit, int block, int half) {
    const int byte = 2 * half + block;
    return ConvertHalf((unit.scales.v[0] >> (8 * byte) & 0x7f) << 7);
  }
};

// K-quants: scales and minima are bytes that the FP16 factors of the super-block multiply. These
// products are exact in FP32.
template <MatrixFormat F>
struct KQuantFragments {
  static constexpr int kBlocks = UnitCols(F) / kQuantBlock;
  static constexpr int kUpperBits = InfoOf(F).bits - 4;
  static constexpr int kScalesAt = kUnitCodeBytes + 32 * UpperBytes(F);
  static constexpr int kFactorBytes = SuperBlockBytes(F) / 8;  // of two outputs
  static constexpr bool kScaled = true;
  static constexpr bool kMinimum = HasMinimum(F);
  static constexpr bool kProducts = false;

  struct Unit {
    Words<16> codes;
    Words<kUpperBits == 0 ? 4 : UpperBytes(F)> upper;  // not used by kQ4_K
    Words<8> scales;
    Words<kFactorBytes> factors;
  };

  static TM_DEVICE Unit Load(const char* tile, int unit, int lane, int64_t) {
    const char* at = tile + UnitOffset(F, unit);
    const char* factors = FactorsOf(tile, unit) + (lane >> 2) * kFactorBytes;
    Unit out;
    out.codes = LoadGlobalOnce(reinterpret_cast<const Words<16>*>(at + lane * 16));
    if constexpr (kUpperBits > 0) {
      using Upper = decltype(out.upper);
      out.upper = LoadGlobalOnce(reinterpret_cast<const Upper*>(at + kUnitCodeBytes) + lane);
    }
    out.scales = LoadGlobalOnce(reinterpret_cast<const Words<8>*>(at + kScalesAt) + (lane >> 2));
    out.factors = LoadGlobal(reinterpret_cast<const Words<kFactorBytes>*>(factors));
    return out;
  }
  static constexpr int kStagedBytes = UnitBytes(F) + SuperBlockBytes(F);
  static TM_DEVICE void Copy(const char* tile, int unit, int lane, int64_t, char* stage) {
    constexpr int kRest = (UnitBytes(F) - kUnitCodeBytes) / 16;
    static_assert(kRest + SuperBlockBytes(F) / 16 <= 32);
    const char* at = tile + UnitOffset(F, unit) + lane * 16;
    CopyAsync(stage + lane * 16, at, 16);
    if (lane < kRest + SuperBlockBytes(F) / 16) {
      const char* rest =
          lane < kRest ? at + kUnitCodeBytes : FactorsOf(tile, unit) + (lane - kRest) * 16;
      CopyAsync(stage + kUnitCodeBytes + lane * 16, rest, 16);
    }
  }
  static TM_DEVICE Unit LoadStaged(const char* stage, int lane) {
    Unit out;
    out.codes = LoadShared<Words<16>>(stage + lane * 16);
    if constexpr (kUpperBits > 0) {
      out.upper =
          LoadShared<decltype(out.upper)>(stage + kUnitCodeBytes + lane * sizeof(out.upper));
    }
    out.scales = LoadShared<Words<8>>(stage + kScalesAt + (lane >> 2) * 8);
    out.factors =
        LoadShared<Words<kFactorBytes>>(stage + UnitBytes(F) + (lane >> 2) * kFactorBytes);
    return out;
  }
  static TM_DEVICE void Expand(const Unit& unit, int block, uint32_t (&pairs)[2][4]) {
    constexpr uint32_t kOffset = ZeroPoint(F) == 0 ? kBFloatMinus128 : kBFloatMinus160;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * kUpperBits * (2 * block + half);
      const uint32_t upper = kUpperBits == 0 ? 0 : unit.upper.v[at / 16];
      ExpandInt<kUpperBits>(unit.codes.v[2 * block + half], upper, at % 16, kOffset, pairs[half]);
    }
  }
  static TM_DEVICE float Scale(const Unit& unit, int block, int half, int part = 0) {
    return FactorAt(unit, 0, half) * ByteAt(unit, part, block, half);
  }
  static TM_DEVICE float Minimum(const Unit& unit, int block, int half) {
    return -(FactorAt(unit, 1, half) * ByteAt(unit, 1, block, half));
  }

 private:
  static TM_DEVICE const char* FactorsOf(const char* tile, int unit) {
    constexpr int64_t kBytes = UnitOffset(F, kUnitsOfSuperBlock);  // with the factors
    const auto super_block = static_cast<unsigned>(unit) / kUnitsOfSuperBlock;
    return tile + super_block * kBytes + kBytes - SuperBlockBytes(F);
  }
  static TM_DEVICE float FactorAt(const Unit& unit, int word, int half) {
    return ConvertHalf(unit.factors.v[word] >> (16 * half));
  }
  // A byte as the lowest bits of 2^23, minus 2^23.
  static TM_DEVICE float ByteAt(const Unit& unit, int word, int block, int half) {
    constexpr uint32_t k2To23 = 0x4b000000u;
    constexpr float kZero = 0x1p23f + (HasHalfScales(F) ? 128.f : 0.f);
    const uint32_t bytes = unit.scales.v[word] >> (8 * (2 * block + half));
    return BitsFloat(AndOr(bytes, 0xff, k2To23)) - kZero;
  }
};

template <>
struct WeightFragments<MatrixFormat::kQ4_K> : KQuantFragments<MatrixFormat::kQ4_K> {};
template <>
struct WeightFragments<MatrixFormat::kQ5_K> : KQuantFragments<MatrixFormat::kQ5_K> {};
template <>
struct WeightFragments<MatrixFormat::kQ6_K> : KQuantFragments<MatrixFormat::kQ6_K> {};

// Row-major weights.
template <>
struct WeightFragments<MatrixFormat::kBF16> {
  static constexpr int kBlocks = 1;
  static constexpr bool kScaled = false;
  static constexpr bool kMinimum = false;
  static constexpr bool kProducts = false;

  struct Unit {
    Words<16> rows[2];
  };

  static TM_DEVICE Unit Load(const char* tile, int unit, int lane, int64_t tile_bytes) {
    const int64_t row_bytes = tile_bytes / kTileOutputs;
    const char* at = tile + (lane >> 2) * row_bytes + unit * 64 + (lane & 3) * 16;
    return {{LoadGlobalOnce(reinterpret_cast<const Words<16>*>(at)),
             LoadGlobalOnce(reinterpret_cast<const Words<16>*>(at + 8 * row_bytes))}};
  }
  static constexpr int kStagedBytes = 2 * 32 * 16;
  static TM_DEVICE void Copy(const char* tile, int unit, int lane, int64_t tile_bytes,
                             char* stage) {
    const int64_t row_bytes = tile_bytes / kTileOutputs;
    const char* at = tile + (lane >> 2) * row_bytes + unit * 64 + (lane & 3) * 16;
    CopyAsync(stage + lane * 16, at, 16);
    CopyAsync(stage + kStagedBytes / 2 + lane * 16, at + 8 * row_bytes, 16);
  }
  static TM_DEVICE Unit LoadStaged(const char* stage, int lane) {
    return {{LoadShared<Words<16>>(stage + lane * 16),
             LoadShared<Words<16>>(stage + kStagedBytes / 2 + lane * 16)}};
  }
  static TM_DEVICE void Expand(const Unit& unit, int, uint32_t (&pairs)[2][4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      pairs[0][p] = unit.rows[0].v[p];
      pairs[1][p] = unit.rows[1].v[p];
    }
  }
  static TM_DEVICE float Scale(const Unit&, int, int) { return 1.f; }
};

// Rows of codes with scales at their ends.
template <MatrixFormat F>
struct Fp8Fragments {
  static constexpr int kBlocks = 2;
  static constexpr bool kScaled = true;
  static constexpr bool kMinimum = false;
  static constexpr bool kProducts = false;

  struct Unit {
    Words<16> rows[2];
    float scales[2];
  };

  static TM_DEVICE Unit Load(const char* tile, int unit, int lane, int64_t tile_bytes) {
    const int64_t row_bytes = tile_bytes / kTileOutputs;
    const char* at = Codes(tile, unit, lane, row_bytes);
    const float* scales = ScaleOfRow(tile, unit, lane >> 2, row_bytes);
    return {{LoadGlobalOnce(reinterpret_cast<const Words<16>*>(at)),
             LoadGlobalOnce(reinterpret_cast<const Words<16>*>(at + 8 * row_bytes))},
            {LoadGlobal(scales), LoadGlobal(scales + 2 * row_bytes)}};
  }
  static constexpr int kStagedCodes = 2 * 32 * 16;
  static constexpr int kStagedBytes = kStagedCodes + 4 * kTileOutputs;
  static TM_DEVICE void Copy(const char* tile, int unit, int lane, int64_t tile_bytes,
                             char* stage) {
    const int64_t row_bytes = tile_bytes / kTileOutputs;
    const char* at = Codes(tile, unit, lane, row_bytes);
    CopyAsync(stage + lane * 16, at, 16);
    CopyAsync(stage + kStagedCodes / 2 + lane * 16, at + 8 * row_bytes, 16);
    if (lane < kTileOutputs) {
      CopyWordAsync(stage + kStagedCodes + lane * 4, ScaleOfRow(tile, unit, lane, row_bytes));
    }
  }
  static TM_DEVICE Unit LoadStaged(const char* stage, int lane) {
    const char* scales = stage + kStagedCodes + (lane >> 2) * 4;
    return {{LoadShared<Words<16>>(stage + lane * 16),
             LoadShared<Words<16>>(stage + kStagedCodes / 2 + lane * 16)},
            {LoadShared<float>(scales), LoadShared<float>(scales + 4 * 8)}};
  }
  static TM_DEVICE void Expand(const Unit& unit, int block, uint32_t (&pairs)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ExpandE4m3(unit.rows[half].v[2 * block], pairs[half]);
      ExpandE4m3(unit.rows[half].v[2 * block + 1], pairs[half] + 2);
    }
  }
  static TM_DEVICE float Scale(const Unit& unit, int, int half) { return unit.scales[half]; }

 private:
  // The lane's 16 codes of the output lane / 4.
  static TM_DEVICE const char* Codes(const char* tile, int unit, int lane, int64_t row_bytes) {
    return tile + (lane >> 2) * row_bytes + unit * UnitCols(F) + (lane & 3) * 16;
  }
  static TM_DEVICE const float* ScaleOfRow(const char* tile, int unit, int row, int64_t row_bytes) {
    const int scale = F == MatrixFormat::kFp8 ? 0 : unit / (kFp8ScaleCols / UnitCols(F));
    return reinterpret_cast<const float*>(tile + (row + 1) * row_bytes) - 1 - scale;
  }
};

template <>
struct WeightFragments<MatrixFormat::kFp8> : Fp8Fragments<MatrixFormat::kFp8> {};
template <>
struct WeightFragments<MatrixFormat::kFp8Block> : Fp8Fragments<MatrixFormat::kFp8Block> {};

// Multiply expanded pairs of an output by its scale, add its minimum, and round to BF16.
template <MatrixFormat F>
TM_DEVICE void ScalePairs(const typename WeightFragments<F>::Unit& unit, int block, int half,
                          uint32_t (&pairs)[4]) {
  using W = WeightFragments<F>;
  if constexpr (W::kScaled) {
    float scales[2] = {W::Scale(unit, block, half)};  // of the first and last four columns
    if constexpr (SplitsColumns(F)) {
      scales[1] = W::Scale(unit, block, half, 1);
    } else {
      scales[1] = scales[0];
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float scale = scales[p / 2];
      if constexpr (F == MatrixFormat::kMxfp4) {  // the products are exact
        pairs[p] = FmaBFloat2(pairs[p], PackBFloat2(scale, scale), kBFloatMinusZero);
        continue;
      }
      float minimum = 0.f;
      if constexpr (W::kMinimum) {
        minimum = W::Minimum(unit, block, half);
      }
      pairs[p] = PackBFloat2(fmaf(scale, BitsFloat(pairs[p] << 16), minimum),
                             fmaf(scale, BitsFloat(pairs[p] & 0xffff0000u), minimum));
    }
  }
}

}  // namespace turbomind::cuda
