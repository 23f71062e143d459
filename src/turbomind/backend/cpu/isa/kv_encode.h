#pragma once

// ⑥ Encoders of rows whose length is a multiple of 16, in lanes: bit for bit what kv/codec.h
// defines (plain rule).

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd.h"
#include "turbomind/kv/codec.h"

namespace turbomind::TM_ISA {

TM_HD I32x16 MagnitudeBits(F32x16 x) { return And(Bits(x), Set1Int(0x7fffffff)); }
TM_HD Mask16 NanLanes(F32x16 x) { return Less(Set1Int(0x7f800000), MagnitudeBits(x)); }
// 16 minus the number of lanes below infinity.
TM_HD int CountNonfinite(F32x16 x) {
  return kLanes - Count(Less(MagnitudeBits(x), Set1Int(0x7f800000)));
}

// Rounded to the cache dtype.
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

// NaN counts as 0, infinities as the largest finite value.
TM_HD F32x16 FiniteLanes(F32x16 x, DataType dtype) {
  const F32x16 most = Set1(LargestFinite(dtype));
  const F32x16 least = Set1(-LargestFinite(dtype));
  return Select(NanLanes(x), Zero(), Max(least, Min(most, x)));
}

// Nearest E2M1 code, ties to even, saturating; NaN gives 7.
TM_HD I32x16 E2m1Lanes(F32x16 x) {
  const F32x16 size = FromBits(MagnitudeBits(x));
  const I32x16 one = Set1Int(1);
  const I32x16 none = Set1Int(0);
  const auto above = [&](float limit) __attribute__((always_inline)) {
    return Select(Less(Set1(limit), size), one, none);
  };
  const auto below = [&](float limit) __attribute__((always_inline)) {
    return Select(Less(size, Set1(limit)), none, one);
  };
  const I32x16 low = Add(Add(above(.25f), below(.75f)), Add(above(1.25f), below(1.75f)));
  const I32x16 high = Add(Add(above(2.5f), below(3.5f)), above(5.f));
  const I32x16 sign = And(ShiftRight<28>(Bits(x)), Set1Int(8));
  return Select(NanLanes(x), Set1Int(7), Or(sign, Add(low, high)));
}

template <class Scale>
int EncodeFp4(const float* row, int n, DataType dtype, float g, uint8_t* payload, uint8_t* meta) {
  int nonfinite = 0;
  for (int d = 0; d < n; d += kLanes) {
    const F32x16 value = RoundLanes(Load(row + d), dtype);
    nonfinite += CountNonfinite(value);
    const F32x16 sizes = FromBits(MagnitudeBits(FiniteLanes(value, dtype)));
    const float amax = ReduceMax(sizes);
    const int byte = amax > 0.f ? Scale::PlainByte(amax, g) : Scale::kZeroBlock;
    meta[d / kLanes] = static_cast<uint8_t>(byte);
    const I32x16 codes = E2m1Lanes(Div(value, Set1(Scale::Divisor(byte, g))));
    StoreNibbles(payload + d / 2, amax > 0.f ? codes : Set1Int(0));
  }
  return nonfinite;
}

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

}  // namespace turbomind::TM_ISA
