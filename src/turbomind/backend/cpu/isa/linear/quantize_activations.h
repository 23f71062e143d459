#pragma once

// Quantizes activations for quantized weights: 16 bits with an FP32 scale per block of 32
// (dense_kernels.h).

#include <cstdint>

#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr float kMaxCode = 127.f * 256.f;
// Below this, kMaxCode / amax overflows and the block counts as zero.
inline constexpr float kMinAmax = 1e-33f;

TM_HD void StoreFloat(float x, uint8_t* to) { __builtin_memcpy(to, &x, sizeof(x)); }

// Quantizes one block of 32 to the high and low halves of its codes. Returns the scale; `sum` is
// the sum of the codes.
TM_HD float QuantizeBlock(const float* x, int8_t* high, int32_t& sum) {
  int8_t* low = high + kQuantBlock;
  uint32_t amax_bits = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const uint32_t magnitude = FloatBits(x[i]) & 0x7fffffffu;
    amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
  }
  const float amax = BitsFloat(amax_bits);
  const bool finite = amax_bits < kInfinityBits;
  sum = 0;
  if (!finite || amax < kMinAmax) {
    __builtin_memset(high, 0, kQuantRowBytes);
    return finite ? 0.f : __builtin_nanf("");
  }
  constexpr float kRound = 12582912.f;  // 1.5 · 2^23: adding it rounds to an integer, ties to even
  const float inverse = kMaxCode / amax;
  int32_t total = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const int32_t code =
        static_cast<int32_t>(FloatBits(x[i] * inverse + kRound) - FloatBits(kRound));
    const int32_t upper = (code + 128) >> 8;
    const int32_t rest = code - upper * 256;
    const int32_t lower = rest < -127 ? -127 : rest;  // spares the kernels the special case of -128
    high[i] = static_cast<int8_t>(upper);
    low[i] = static_cast<int8_t>(lower);
    total += upper * 256 + lower;
  }
  sum = total;
  return amax / kMaxCode;
}

}  // namespace turbomind::TM_ISA
