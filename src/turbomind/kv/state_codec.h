#pragma once

// Conversions of the values of a state (StateFormat). Every device returns the same bits.

#include <cstdint>

#include "turbomind/core/float_convert.h"
#include "turbomind/core/host_device.h"

namespace turbomind {

// The scale of a row of kInt8, and its reciprocal.
struct StateScale {
  float scale = 0.f;
  float inverse = 0.f;
};

// `max_bits` are the bits of the largest magnitude in the row. A row of values whose scale would
// have no reciprocal is stored as zeros. A row with NaN or infinity is not finite when it is read.
TM_HD StateScale MakeStateScale(uint32_t max_bits) {
  constexpr uint32_t kLeast = 0x0D800000u;  // 2^-100
  if (max_bits < kLeast) {
    return {};
  }
  const float max = BitsFloat(max_bits);
  return {max / 127.f, 127.f / max};
}

// Returns the integer nearest to x * inverse, ties to even.
TM_HD int8_t EncodeStateValue(float x, float inverse) {
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: the last bit of the sum has the value 1
  return static_cast<int8_t>(FloatBits(x * inverse + kMagic) - FloatBits(kMagic));
}

TM_HD float DecodeStateValue(int8_t code, float scale) { return static_cast<float>(code) * scale; }

}  // namespace turbomind
