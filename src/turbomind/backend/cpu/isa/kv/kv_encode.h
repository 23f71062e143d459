#pragma once

// ⑥ Encoders of rows whose length is a multiple of 16. They use lanes and return exactly the bits
// that kv/codec.h defines.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/kv/codec.h"

namespace turbomind::TM_ISA {

TM_HD I32x16 MagnitudeBits(F32x16 x) { return And(Bits(x), Set1Int(0x7fffffff)); }
TM_HD Mask16 NanLanes(F32x16 x) { return Less(Set1Int(0x7f800000), MagnitudeBits(x)); }
// Returns the number of lanes that are NaN or infinite.
TM_HD int CountNonfinite(F32x16 x) {
  return kLanes - Count(Less(MagnitudeBits(x), Set1Int(0x7f800000)));
}

// Finite lanes beyond a finite limit.
TM_HD int CountBeyond(F32x16 x, float limit) {
  return Count(Less(Set1Int(static_cast<int32_t>(FloatBits(limit))), MagnitudeBits(x))) -
         CountNonfinite(x);
}

// Rounds to the cache dtype.
TM_HD F32x16 RoundLanes(F32x16 x, DataType dtype) {
  if (dtype == DataType::kFloat32) {
    return x;
  }
  if (dtype == DataType::kFloat16) {
    return HalfToFloat(FloatToHalf(x));
  }
  const I32x16 bits = Bits(x);
  const I32x16 odd = And(ShiftRight<16>(bits), Set1Int(1));
  const I32x16 rounded = And(Add(Add(bits, odd), Set1Int(0x7fff)), Set1Int(-65536));
  return Select(NanLanes(x), x, FromBits(rounded));
}

// Replaces NaN with 0 and infinities with the largest finite value.
TM_HD F32x16 FiniteLanes(F32x16 x, DataType dtype) {
  const F32x16 upper = Set1(LargestFinite(dtype));
  const F32x16 lower = Set1(-LargestFinite(dtype));
  return Select(NanLanes(x), Zero(), Max(lower, Min(upper, x)));
}

// --- FP4 --------------------------------------------------------------------------------------

// Returns the E2M1 value nearest to x >= 0, ties to the even code. Adding 1.5 * 2^22 times x's
// binade leaves one bit after the leading one. Below 1, the steps stay 0.5.
TM_HD F32x16 NearestE2m1(F32x16 x) {
  const F32x16 clipped = Min(x, Set1(6.f));
  const I32x16 binade = And(Bits(Max(clipped, Set1(1.f))), Set1Int(0x7f800000));
  const F32x16 magic = FromBits(Add(binade, Set1Int((22 << 23) + 0x400000)));
  return Sub(Add(clipped, magic), magic);
}

// Returns the nearest E2M1 code, ties to even, saturating. NaN returns 7.
TM_HD I32x16 E2m1Lanes(F32x16 x) {
  const F32x16 size = NearestE2m1(FromBits(MagnitudeBits(x)));
  // From 1 on, the exponent and the first mantissa bit count the codes; below 1, halves do.
  const I32x16 from_one = Sub(ShiftRight<22>(Bits(size)), Set1Int(252));
  const I32x16 below_one = ToInt(Min(Add(size, size), Set1(1.f)));
  const I32x16 sign = And(ShiftRight<28>(Bits(x)), Set1Int(8));
  return Select(NanLanes(x), Set1Int(7), Or(sign, MaxInt(from_one, below_one)));
}

// One group, rounded to the cache dtype, and its plain scale byte.
struct Fp4Input {
  F32x16 value;
  F32x16 sizes;  // magnitudes of the finite values
  float amax;
  int plain;
};

template <class Scale>
TM_HD Fp4Input LoadGroup(const float* x, DataType dtype, float global_scale) {
  Fp4Input in;
  in.value = RoundLanes(Load(x), dtype);
  in.sizes = FromBits(MagnitudeBits(FiniteLanes(in.value, dtype)));
  in.amax = ReduceMax(in.sizes);
  in.plain = in.amax > 0.f ? Scale::PlainByte(in.amax, global_scale) : Scale::kZeroBlock;
  return in;
}

template <class Scale>
TM_HD void StoreGroup(const Fp4Input& in, int byte, float global_scale, uint8_t* payload,
                      uint8_t* meta) {
  *meta = static_cast<uint8_t>(byte);
  const I32x16 codes = E2m1Lanes(Div(in.value, Set1(Scale::Divisor(byte, global_scale))));
  StoreNibbles(payload, in.amax > 0.f ? codes : Set1Int(0));
}

// Candidate scales in the order of the search: lanes 0 to 7 for one group, lanes 8 to 15 for
// another.
template <class Scale>
struct CandidateLanes;

template <>
struct CandidateLanes<NvScale> {
  static TM_HD I32x16 Bytes(I32x16 plain) {
    alignas(64) static constexpr int32_t kOffsets[16] = {0, -1, -2, 1, 2, 3, 4, 5,
                                                         0, -1, -2, 1, 2, 3, 4, 5};
    const I32x16 bytes = Add(plain, LoadInt(kOffsets));
    return MinInt(MaxInt(bytes, Set1Int(kNvMinByte)), Set1Int(kNvMaxByte));
  }
  static TM_HD F32x16 Steps(I32x16 bytes) { return ScaleValue<KvCacheMode::kFp4Nv, 0>(bytes); }
};

template <>
struct CandidateLanes<MxScale> {
  static TM_HD I32x16 Bytes(I32x16 plain) {  // two of each eight lanes are used
    alignas(64) static constexpr int32_t kOffsets[16] = {0, -1, 0, 0, 0, 0, 0, 0,
                                                         0, -1, 0, 0, 0, 0, 0, 0};
    return MaxInt(Add(plain, LoadInt(kOffsets)), Set1Int(kMxMinByte));
  }
  static TM_HD F32x16 Steps(I32x16 bytes) { return ScaleValue<KvCacheMode::kFp4Mx, 0>(bytes); }
};

// Minus the E2M1 value nearest to i / 4 and above.
alignas(64) inline constexpr float kQuarters[32] = {
    -0.f, -.5f, -.5f, -1.f, -1.f, -1.5f, -1.5f, -2.f, -2.f, -2.f, -3.f,
    -3.f, -3.f, -3.f, -4.f, -4.f, -4.f,  -4.f,  -4.f, -4.f, -6.f, -6.f,
    -6.f, -6.f, -6.f, -6.f, -6.f, -6.f,  -6.f,  -6.f, -6.f, -6.f};

// Returns true if the search may multiply by 4 / divisor and look up the quarters.
// MXFP4: the divisor is a power of two, so the product is exact.
// NVFP4 with a power of two for global_scale: divisors have 4 bits and 16-bit values at most 11. So
// x is on a midpoint between two codes, or its relative distance from every midpoint is at least
// 2^-11. On a midpoint, the table may return either side. Both give the same error, because decoded
// values and differences are exact.
template <class Scale>
TM_HD bool CanLookUp(const RowFormat& f) {
  const bool short_scale = (FloatBits(f.global_scale) & 0x7FFFFFu) == 0 &&
                           f.global_scale >= 0x1p-64f && f.global_scale <= 0x1p64f;
  return Scale::kCandidates == MxScale::kCandidates ||
         (f.dtype != DataType::kFloat32 && short_scale);
}

// The search state of pairs of groups: the magnitudes of their values, the steps of their
// candidates (one per lane) and the resulting squared errors.
template <int kPairs>
struct PairLanes {
  alignas(64) float sizes[2 * kPairs][kLanes];
  F32x16 steps[kPairs];
  F32x16 errors[kPairs];
};

// Sums the errors over the 16 values in order. Several pairs hide each other's latency.
template <bool kLookUp, int kPairs>
TM_HD void SumErrors(PairLanes<kPairs>& lanes, float global_scale) {
  const Table32 quarters = LoadTable32(kQuarters);
  const Mask16 first = LaneRange(0, 8);
  F32x16 divisor[kPairs];
  F32x16 inverse[kPairs];
  F32x16 sum[kPairs];
  Unroll<kPairs>([&](auto pair) __attribute__((always_inline)) {
    constexpr int p = decltype(pair)::value;
    divisor[p] = Mul(lanes.steps[p], Set1(global_scale));
    inverse[p] = Div(Set1(4.f), divisor[p]);
    sum[p] = Zero();
  });
#pragma GCC unroll 2  // a larger factor makes the compiler spill the gathered values
  for (int i = 0; i < kLanes; ++i) {
    Unroll<kPairs>([&](auto pair) __attribute__((always_inline)) {
      constexpr int p = decltype(pair)::value;
      const F32x16 x = Select(first, Set1(lanes.sizes[2 * p][i]), Set1(lanes.sizes[2 * p + 1][i]));
      F32x16 difference;
      if constexpr (kLookUp) {
        const F32x16 ratio = Min(Mul(x, inverse[p]), Set1(31.f));
        difference = Fma(Lookup(quarters, Truncate(ratio)), divisor[p], x);
      } else {
        const F32x16 ratio = NearestE2m1(Div(x, divisor[p]));
        difference = Sub(x, Mul(Mul(ratio, lanes.steps[p]), Set1(global_scale)));
      }
      sum[p] = Add(sum[p], Mul(difference, difference));
    });
  }
  for (int p = 0; p < kPairs; ++p) {
    lanes.errors[p] = sum[p];
  }
}

// Sets bit i if lane i's error is not the least of its group of 8 lanes.
TM_HD unsigned WorseLanes(F32x16 errors) {
  F32x16 min_error = Min(errors, SwapLanes<4>(errors));
  min_error = Min(min_error, SwapLanes<2>(min_error));
  min_error = Min(min_error, SwapLanes<1>(min_error));
  return MaskBits(Less(min_error, errors));
}

// Runs Fp4Codec::SearchByte for 2 * kPairs groups.
template <class Scale, int kPairs>
TM_HD void SearchBytes(const RowFormat& f, const Fp4Input (&in)[2 * kPairs],
                       int (&bytes)[2 * kPairs]) {
  PairLanes<kPairs> lanes;
  for (int p = 0; p < kPairs; ++p) {
    Store(lanes.sizes[2 * p], in[2 * p].sizes);
    Store(lanes.sizes[2 * p + 1], in[2 * p + 1].sizes);
    const I32x16 plain =
        Select(LaneRange(0, 8), Set1Int(in[2 * p].plain), Set1Int(in[2 * p + 1].plain));
    lanes.steps[p] = CandidateLanes<Scale>::Steps(CandidateLanes<Scale>::Bytes(plain));
  }
  const float global_scale = Scale::kCandidates == MxScale::kCandidates ? 1.f : f.global_scale;
  if (CanLookUp<Scale>(f)) {
    SumErrors<true>(lanes, global_scale);
  } else {
    SumErrors<false>(lanes, global_scale);
  }
  for (int p = 0; p < kPairs; ++p) {
    const unsigned worse = WorseLanes(lanes.errors[p]);
    for (int i = 2 * p; i < 2 * p + 2; ++i) {
      const int k = __builtin_ctz(~worse >> (8 * (i - 2 * p)));
      bytes[i] = in[i].amax > 0.f ? Scale::Candidate(in[i].plain, k) : Scale::kZeroBlock;
    }
  }
}

// The destination of `count` groups of a row.
struct GroupTarget {
  uint8_t* payload;
  uint8_t* meta;
  int count;
};

// Few groups have a value beyond the limit.
TM_HD void CountGroup(const Fp4Input& in, float limit, RowCounts& counts) {
  counts.nonfinite += CountNonfinite(in.value);
  if (in.amax > limit) {
    counts.clipped += CountBeyond(in.value, limit);
  }
}

template <class Scale, int kPairs>
TM_HD void EncodeGroups(const RowFormat& f, const float* row, const GroupTarget& to,
                        RowCounts& counts) {
  Fp4Input in[2 * kPairs];
  for (int i = 0; i < 2 * kPairs; ++i) {  // missing groups repeat the last one
    const int group = i < to.count ? i : to.count - 1;
    in[i] = LoadGroup<Scale>(row + group * kLanes, f.dtype, f.global_scale);
  }
  int bytes[2 * kPairs];
  SearchBytes<Scale, kPairs>(f, in, bytes);
  const float limit = ClipLimit(f.format, f.global_scale);
  for (int i = 0; i < to.count; ++i) {
    CountGroup(in[i], limit, counts);
    StoreGroup<Scale>(in[i], bytes[i], f.global_scale, to.payload + i * kLanes / 2, to.meta + i);
  }
}

template <class Scale>
RowCounts EncodeFp4Searching(const RowFormat& f, const float* row, uint8_t* payload,
                             uint8_t* meta) {
  RowCounts counts;
  int d = 0;
  for (; d + 4 * kLanes <= f.n; d += 4 * kLanes) {
    EncodeGroups<Scale, 2>(f, row + d, {payload + d / 2, meta + d / kLanes, 4}, counts);
  }
  for (; d < f.n; d += 2 * kLanes) {
    const int count = d + kLanes < f.n ? 2 : 1;
    EncodeGroups<Scale, 1>(f, row + d, {payload + d / 2, meta + d / kLanes, count}, counts);
  }
  return counts;
}

template <class Scale>
RowCounts EncodeFp4(const RowFormat& f, const float* row, uint8_t* payload, uint8_t* meta) {
  if (f.search) {
    return EncodeFp4Searching<Scale>(f, row, payload, meta);
  }
  const float limit = ClipLimit(f.format, f.global_scale);
  RowCounts counts;
  for (int d = 0; d < f.n; d += kLanes) {
    const Fp4Input in = LoadGroup<Scale>(row + d, f.dtype, f.global_scale);
    CountGroup(in, limit, counts);
    StoreGroup<Scale>(in, in.plain, f.global_scale, payload + d / 2, meta + d / kLanes);
  }
  return counts;
}

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
