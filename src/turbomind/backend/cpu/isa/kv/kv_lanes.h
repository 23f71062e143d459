#pragma once

// ⑥ Checks and rounding of values in lanes, which the encoders of all formats use.

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd/simd.h"
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

}  // namespace turbomind::TM_ISA
