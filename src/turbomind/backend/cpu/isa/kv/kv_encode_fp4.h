#pragma once

// ⑥ The encoders of MXFP4 and NVFP4: the plain scale of each group, or the search for the one with
// the smallest error (kv/codec.h).

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/kv/kv_lanes.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/kv/codec.h"

namespace turbomind::TM_ISA {

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

}  // namespace turbomind::TM_ISA
