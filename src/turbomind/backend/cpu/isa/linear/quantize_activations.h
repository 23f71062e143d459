#pragma once

// Quantizes activations for quantized weights: 16 or 8 bits with an FP32 scale per block of 32
// (dense_kernels.h).

#include <cstdint>

#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr float kMaxCode = 127.f * 256.f;
inline constexpr float kMaxInt8Code = 127.f;
// Below this, kMaxCode / amax overflows and the block counts as zero.
inline constexpr float kMinAmax = 1e-33f;

TM_HD void StoreFloat(float x, uint8_t* to) { __builtin_memcpy(to, &x, sizeof(x)); }

// Stores what a zero point adds to the products of codes with this sum.
TM_HD void StoreOffset(MatrixFormat format, int32_t sum, uint8_t* to) {
  const int32_t offset = -ZeroPoint(format) * sum;
  __builtin_memcpy(to, &offset, sizeof(offset));
}

// The largest magnitude of a block of 32.
struct BlockRange {
  float amax = 0.f;
  bool finite = true;

  TM_HD bool is_zero() const { return !finite || amax < kMinAmax; }
  // Returns the scale of a block whose codes are all zero.
  TM_HD float zero_scale() const { return finite ? 0.f : __builtin_nanf(""); }
};

TM_HD BlockRange RangeOf(const float* x) {
  uint32_t amax_bits = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const uint32_t magnitude = FloatBits(x[i]) & 0x7fffffffu;
    amax_bits = magnitude > amax_bits ? magnitude : amax_bits;
  }
  return {BitsFloat(amax_bits), amax_bits < kInfinityBits};
}

// Rounds to an integer, ties to even. REQUIRES: |x| < 2^22.
TM_HD int32_t RoundToInt(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 · 2^23: the sum has no fraction bits
  return static_cast<int32_t>(FloatBits(x + kRound) - FloatBits(kRound));
}

// Quantizes one block of 32 to the high and low halves of its codes. Returns the scale; `sum` is
// the sum of the codes.
TM_HD float QuantizeBlock(const float* x, int8_t* high, int32_t& sum) {
  int8_t* low = high + kQuantBlock;
  const BlockRange range = RangeOf(x);
  sum = 0;
  if (range.is_zero()) {
    __builtin_memset(high, 0, kQuantRowBytes);
    return range.zero_scale();
  }
  const float inverse = kMaxCode / range.amax;
  int32_t total = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const int32_t code = RoundToInt(x[i] * inverse);
    const int32_t upper = (code + 128) >> 8;
    const int32_t rest = code - upper * 256;
    const int32_t lower = rest < -127 ? -127 : rest;  // spares the kernels the special case of -128
    high[i] = static_cast<int8_t>(upper);
    low[i] = static_cast<int8_t>(lower);
    total += upper * 256 + lower;
  }
  sum = total;
  return range.amax / kMaxCode;
}

// Quantizes one block of 32 to int8 codes from -127 to 127. Returns the scale; `sum` is the sum of
// the codes.
TM_HD float QuantizeInt8Block(const float* x, int8_t* codes, int32_t& sum) {
  const BlockRange range = RangeOf(x);
  sum = 0;
  if (range.is_zero()) {
    __builtin_memset(codes, 0, kQuantBlock);
    return range.zero_scale();
  }
  const float inverse = kMaxInt8Code / range.amax;
  int32_t total = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const int32_t code = RoundToInt(x[i] * inverse);
    codes[i] = static_cast<int8_t>(code);
    total += code;
  }
  sum = total;
  return range.amax / kMaxInt8Code;
}

}  // namespace turbomind::TM_ISA
