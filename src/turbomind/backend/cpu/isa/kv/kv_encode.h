#pragma once

// ⑥ Encoders of rows whose length is a multiple of 16. They use lanes and return exactly the bits
// that kv/codec.h defines.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/kv/kv_encode_fp4.h"
#include "turbomind/backend/cpu/isa/kv/kv_lanes.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/kv/codec.h"

namespace turbomind::TM_ISA {

// --- The cache dtype --------------------------------------------------------------------------

inline int EncodeNone(const float* row, int n, DataType dtype, uint8_t* payload) {
  int nonfinite = 0;
  for (int d = 0; d < n; d += kLanes) {
    const F32x16 x = Load(row + d);
    if (dtype == DataType::kFloat32) {
      nonfinite += CountNonfinite(x);
      StoreInt(payload + 4 * d, Bits(x));
    } else if (dtype == DataType::kFloat16) {
      const I32x16 half = FloatToHalf(x);
      nonfinite += CountNonfinite(HalfToFloat(half));
      StoreShorts(payload + 2 * d, half);
    } else {
      const F32x16 rounded = RoundLanes(x, dtype);
      nonfinite += CountNonfinite(rounded);
      const I32x16 quiet = Or(ShiftRight<16>(Bits(x)), Set1Int(0x40));
      StoreShorts(payload + 2 * d, Select(NanLanes(x), quiet, ShiftRight<16>(Bits(rounded))));
    }
  }
  return nonfinite;
}

inline void DecodeNone(const uint8_t* payload, int n, DataType dtype, float* row) {
  int nans = 0;
  for (int d = 0; d < n; d += kLanes) {
    F32x16 x;
    if (dtype == DataType::kFloat32) {
      x = FromBits(LoadInt(payload + 4 * d));
    } else if (dtype == DataType::kFloat16) {
      x = HalfToFloat(LoadShorts(payload + 2 * d));
      nans += Count(NanLanes(x));
    } else {
      x = FromBits(ShiftLeft<16>(LoadShorts(payload + 2 * d)));
    }
    Store(row + d, x);
  }
  if (nans != 0) {  // the hardware makes signaling NaN quiet
    Codec<KvCacheMode::kNone>::DecodeRow(payload, nullptr, n, dtype, 1.f, row);
  }
}

// --- FP8 --------------------------------------------------------------------------------------

// Nearest code of an 8-bit float with these mantissa bits and this exponent bias, ties to even,
// saturating at `largest`; NaN gives 0x7F. Adding 2^(23 - kMantissa) times x's binade leaves
// kMantissa bits after its leading one; below the least normal number the steps stay the same.
template <int kMantissa, int kBias>
TM_HD I32x16 Fp8Lanes(F32x16 x, float largest) {
  constexpr int kMinNormal = (127 - kBias + 1) << 23;
  const F32x16 size = Min(FromBits(MagnitudeBits(x)), Set1(largest));
  const I32x16 normal = MaxInt(Bits(size), Set1Int(kMinNormal));
  const I32x16 binade = And(normal, Set1Int(0x7f800000));
  const I32x16 magic = Add(binade, Set1Int((23 - kMantissa) << 23));
  const I32x16 steps = Sub(Bits(Add(size, FromBits(magic))), magic);
  const I32x16 below = ShiftRight<23 - kMantissa>(Sub(binade, Set1Int(kMinNormal)));
  const I32x16 sign = And(ShiftRight<24>(Bits(x)), Set1Int(0x80));
  return Select(NanLanes(x), Set1Int(0x7f), Or(sign, Add(steps, below)));
}

template <bool kE4M3>
RowCounts EncodeFp8(const RowFormat& f, const float* row, uint8_t* payload) {
  const float limit = ClipLimit(f.format, f.global_scale);
  I32x16 top = Set1Int(0);
  for (int d = 0; d < f.n; d += kLanes) {
    const F32x16 value = RoundLanes(Load(row + d), f.dtype);
    top = MaxInt(top, MagnitudeBits(value));
    const F32x16 x = Div(value, Set1(f.global_scale));
    StoreBytes(payload + d, kE4M3 ? Fp8Lanes<3, 7>(x, 448.f) : Fp8Lanes<2, 15>(x, 57344.f));
  }
  RowCounts counts;
  // NaN and infinities are beyond the limit too. Few rows have any of them.
  if (Count(Less(Set1Int(static_cast<int32_t>(FloatBits(limit))), top)) > 0) {
    for (int d = 0; d < f.n; d += kLanes) {
      const F32x16 value = RoundLanes(Load(row + d), f.dtype);
      counts.nonfinite += CountNonfinite(value);
      counts.clipped += CountBeyond(value, limit);
    }
  }
  return counts;
}

// --- Integers ---------------------------------------------------------------------------------

template <int kIntBits>
int EncodeInt(const float* row, int n, DataType dtype, uint8_t* payload, uint8_t* meta) {
  using Definition = IntCodec<kIntBits>;
  int nonfinite = 0;
  F32x16 low = Set1(__builtin_inff());
  F32x16 high = Set1(-__builtin_inff());
  for (int d = 0; d < n; d += kLanes) {
    const F32x16 rounded = RoundLanes(Load(row + d), dtype);
    nonfinite += CountNonfinite(rounded);
    const F32x16 value = FiniteLanes(rounded, dtype);
    low = Min(value, low);
    high = Max(value, high);
  }
  // Adding 0 makes the sign of a zero independent of the order.
  const float zero = ReduceMin(low) + 0.f;
  const float range = ReduceMax(high) + 0.f - zero;
  const float step =
      (range < Definition::kWidest ? range : Definition::kWidest) / Definition::kLevels;
  const float scale = RoundTo(step, dtype);
  StoreAs(scale, dtype, meta, 0);
  StoreAs(zero, dtype, meta, 1);
  for (int d = 0; d < n; d += kLanes) {
    const F32x16 value = FiniteLanes(RoundLanes(Load(row + d), dtype), dtype);
    const F32x16 steps = Div(Sub(value, Set1(zero)), Set1(scale));
    const F32x16 clamped = Max(Min(steps, Set1(Definition::kLevels)), Zero());
    const I32x16 codes = scale > 0.f ? ToInt(clamped) : Set1Int(0);
    if (kIntBits == 8) {
      StoreBytes(payload + d, codes);
    } else {
      StoreNibbles(payload + d / 2, codes);
    }
  }
  return nonfinite;
}

// --- By format --------------------------------------------------------------------------------

// Encodes rows of any length by the definition.
template <KvCacheMode M>
struct DefinedEncoder {
  static RowCounts Encode(const RowFormat& f, const float* row, uint8_t* payload, uint8_t* meta) {
    const int nonfinite = Codec<M>::EncodeRow(row, f.n, f.dtype, f.global_scale, payload, meta);
    return {nonfinite, CountClipped(row, f.n, f.dtype, ClipLimit(M, f.global_scale))};
  }
};

// Encodes rows whose length is a multiple of kLanes. A format without a specialization uses the
// definition.
template <KvCacheMode M>
struct RowEncoder : DefinedEncoder<M> {};

template <>
struct RowEncoder<KvCacheMode::kNone> {
  static RowCounts Encode(const RowFormat& f, const float* row, uint8_t* payload, uint8_t*) {
    return {EncodeNone(row, f.n, f.dtype, payload), 0};
  }
};

template <int kIntBits>
struct IntEncoder {
  static RowCounts Encode(const RowFormat& f, const float* row, uint8_t* payload, uint8_t* meta) {
    return {EncodeInt<kIntBits>(row, f.n, f.dtype, payload, meta), 0};
  }
};
template <>
struct RowEncoder<KvCacheMode::kInt8> : IntEncoder<8> {};
template <>
struct RowEncoder<KvCacheMode::kInt4> : IntEncoder<4> {};

template <bool kE4M3>
struct Fp8Encoder {
  static RowCounts Encode(const RowFormat& f, const float* row, uint8_t* payload, uint8_t*) {
    return EncodeFp8<kE4M3>(f, row, payload);
  }
};
template <>
struct RowEncoder<KvCacheMode::kFp8E4m3> : Fp8Encoder<true> {};
template <>
struct RowEncoder<KvCacheMode::kFp8E5m2> : Fp8Encoder<false> {};

template <class Scale>
struct Fp4Encoder {
  static RowCounts Encode(const RowFormat& f, const float* row, uint8_t* payload, uint8_t* meta) {
    return EncodeFp4<Scale>(f, row, payload, meta);
  }
};
template <>
struct RowEncoder<KvCacheMode::kFp4Mx> : Fp4Encoder<MxScale> {};
template <>
struct RowEncoder<KvCacheMode::kFp4Nv> : Fp4Encoder<NvScale> {};

}  // namespace turbomind::TM_ISA
