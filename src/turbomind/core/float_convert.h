#pragma once

// Conversions between FP32 and the small floating-point types, by integer arithmetic on the bits.
// Every encoder rounds to nearest, ties to even. Everything is always inlined and calls no library
// function, so it is safe in files compiled for a newer instruction set.

#include <cstdint>

#include "turbomind/core/dtype.h"
#include "turbomind/core/host_device.h"

namespace turbomind {

TM_HD uint32_t FloatBits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

TM_HD float BitsFloat(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

TM_HD bool IsNan(float x) { return (FloatBits(x) & 0x7FFFFFFFu) > 0x7F800000u; }
TM_HD bool IsFinite(float x) { return (FloatBits(x) & 0x7F800000u) != 0x7F800000u; }
TM_HD float Magnitude(float x) { return BitsFloat(FloatBits(x) & 0x7FFFFFFFu); }

// Rounds x in [0, 2^22) to the nearest integer, ties to even. Not valid for other values.
TM_HD float RoundSmall(float x) { return (x + 12582912.f) - 12582912.f; }  // 1.5 * 2^23

TM_HD uint16_t FloatToBFloat16(float x) {
  const uint32_t bits = FloatBits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // keeps it a quiet NaN
  }
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

TM_HD float BFloat16ToFloat(uint16_t code) { return BitsFloat(static_cast<uint32_t>(code) << 16); }

TM_HD uint16_t FloatToHalf(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t size = bits & 0x7FFFFFFFu;
  uint32_t code;
  if (size > 0x7F800000u) {
    code = 0x7E00u | ((size >> 13) & 0x1FFu);
  } else if (size >= 0x477FF000u) {  // 65520 and above round to infinity
    code = 0x7C00u;
  } else if (size < 0x38800000u) {  // below 2^-14: the last bit of the sum has the value 2^-24
    code = FloatBits(BitsFloat(size) + 0.5f) - 0x3F000000u;
  } else {
    code = (size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | code);
}

TM_HD float HalfToFloat(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t size = code & 0x7FFFu;
  uint32_t bits;
  if (size >= 0x7C00u) {
    bits = 0x7F800000u | ((size & 0x3FFu) << 13);
  } else if (size >= 0x400u) {
    bits = (size << 13) + 0x38000000u;
  } else {
    bits = FloatBits(static_cast<float>(size) * 5.9604644775390625e-8f);  // 2^-24
  }
  return BitsFloat(sign | bits);
}

// Rounds x to `dtype`.
TM_HD float RoundTo(float x, DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return HalfToFloat(FloatToHalf(x));
    case DataType::kBFloat16:
      return BFloat16ToFloat(FloatToBFloat16(x));
    case DataType::kFloat32:
      break;
  }
  return x;
}

TM_HD float LargestFinite(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return 65504.f;
    case DataType::kBFloat16:
      return BitsFloat(0x7F7F0000u);
    case DataType::kFloat32:
      break;
  }
  return BitsFloat(0x7F7FFFFFu);
}

// Write and read element i of an array of `dtype`, with any alignment.
TM_HD void StoreAs(float x, DataType dtype, uint8_t* to, int i) {
  if (dtype == DataType::kFloat32) {
    __builtin_memcpy(to + i * 4, &x, 4);
  } else {
    const uint16_t code = dtype == DataType::kFloat16 ? FloatToHalf(x) : FloatToBFloat16(x);
    __builtin_memcpy(to + i * 2, &code, 2);
  }
}

TM_HD float LoadAs(const uint8_t* from, DataType dtype, int i) {
  if (dtype == DataType::kFloat32) {
    float x;
    __builtin_memcpy(&x, from + i * 4, 4);
    return x;
  }
  uint16_t code;
  __builtin_memcpy(&code, from + i * 2, 2);
  return dtype == DataType::kFloat16 ? HalfToFloat(code) : BFloat16ToFloat(code);
}

// Converts to an 8-bit float with kMantissa stored mantissa bits, exponent bias kBias and largest
// finite code kMax. Saturates; every NaN becomes 0x7F.
template <int kMantissa, int kBias, int kMax>
TM_HD uint8_t FloatToFp8(float x) {
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;
  constexpr uint32_t kPerUnit = static_cast<uint32_t>(127 + kBias - 1 + kMantissa) << 23;
  constexpr int kDropped = 23 - kMantissa;
  const uint32_t bits = FloatBits(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) {
    return 0x7F;
  }
  uint32_t code;
  if (size < kMinNormal) {
    code = static_cast<uint32_t>(RoundSmall(BitsFloat(size) * BitsFloat(kPerUnit)));
  } else {
    const uint32_t half = (1u << (kDropped - 1)) - 1u + ((size >> kDropped) & 1u);
    code = ((size + half) >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
    code = code > static_cast<uint32_t>(kMax) ? static_cast<uint32_t>(kMax) : code;
  }
  return static_cast<uint8_t>(sign | code);
}

TM_HD uint8_t FloatToE4M3(float x) { return FloatToFp8<3, 7, 0x7E>(x); }
TM_HD uint8_t FloatToE5M2(float x) { return FloatToFp8<2, 15, 0x7B>(x); }

TM_HD float E4M3ToFloat(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t size = code & 0x7Fu;
  uint32_t bits;
  if (size == 0x7Fu) {
    bits = 0x7FC00000u;
  } else if (size >= 8u) {
    bits = (size << 20) + (120u << 23);
  } else {
    bits = FloatBits(static_cast<float>(size) * 0.001953125f);  // 2^-9
  }
  return BitsFloat(sign | bits);
}

// E5M2 is the high byte of an FP16.
TM_HD float E5M2ToFloat(uint8_t code) {
  return HalfToFloat(static_cast<uint16_t>(static_cast<uint32_t>(code) << 8));
}

TM_HD uint8_t FloatToE2M1(float x) {
  if (IsNan(x)) {
    return 7;
  }
  const float size = Magnitude(x);
  const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                   (size > 2.5f) + (size >= 3.5f) + (size > 5.f);
  return static_cast<uint8_t>(((FloatBits(x) >> 28) & 8u) | static_cast<uint32_t>(code));
}

TM_HD float E2M1ToFloat(uint8_t code) {
  const uint32_t size = code & 7u;
  const uint32_t sign = static_cast<uint32_t>(code & 8u) << 28;
  // 1, 1.5, 2, ... have one mantissa bit and bias 1. Code 1 is the only subnormal.
  const uint32_t bits = size >= 2u ? (size << 22) + (126u << 23) : (size ? 0x3F000000u : 0u);
  return BitsFloat(sign | bits);
}

// Returns the power of two 2^(code - 127). Code 0 is subnormal, code 255 is NaN.
TM_HD float E8M0ToFloat(uint8_t code) {
  const uint32_t ends = code == 0 || code == 255 ? 0x00400000u : 0u;
  return BitsFloat((static_cast<uint32_t>(code) << 23) | ends);
}

// Returns element i of a row of packed 4-bit codes. Even elements are in the low nibble.
TM_HD uint8_t Nibble(const uint8_t* payload, int i) {
  return static_cast<uint8_t>((payload[i >> 1] >> ((i & 1) * 4)) & 15);
}

}  // namespace turbomind
