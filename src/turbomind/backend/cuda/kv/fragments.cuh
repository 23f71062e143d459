#pragma once

// Conversion of stored rows to operands of the tensor cores: registers of two FP16 values, or BF16
// for a BF16 cache that is not quantized. In software, E2M1 goes through bytes of E5M2: after two
// masks, a code's bits are those of a small FP16, and one multiplication by the scale normalizes
// it. GPUs from Blackwell on convert codes in hardware (kHasE2m1). In both cases every product is
// exact for the scales that are stored (docs/kv_cache.md).
//
// Fragments<M, T> has
//   kBits, kDims      payload bits per value, values per 32-bit word
//   kBFloat           operands are BF16
//   kUnit             factor from a raw product to the value (FP4)
//   Expand            a word of one token → kDims / 2 pairs; pair p has the dimensions (Low(p),
//                     High(p)) of the word
//   ExpandTokens      words of two tokens → kDims pairs; pair i has dimension i of both tokens
//   kHardware         FP4: the template argument of ScalePair and ScalesOf that fits Expand
// Expanded values are raw: FP4 without its scale, integers as codes.

#include <cstdint>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/core/dtype.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/kv/kv_format.h"

namespace turbomind::cuda {

// Convert eight nibbles to FP16 pairs (n_k, n_{k + 4}) for k = 0..3, times 2^-14.
TM_DEVICE void ExpandE2m1(uint32_t word, uint32_t (&out)[4]) {
  const uint32_t odd = AndOr(word, 0x80808080u, (word >> 3) & 0x0e0e0e0eu);
  const uint32_t even = AndOr(word << 4, 0x80808080u, (word << 1) & 0x0e0e0e0eu);
  out[0] = SelectBytes(even, 0, 0x2404);
  out[1] = SelectBytes(odd, 0, 0x2404);
  out[2] = even & 0xff00ff00u;
  out[3] = odd & 0xff00ff00u;
}

inline constexpr uint32_t kHalf1024 = 0x64006400u;  // bits 0..9 count in units of 1
inline constexpr uint32_t kHalfMinus1024 = 0xe400e400u;
inline constexpr uint32_t kHalfOne = 0x3c003c00u;

TM_DEVICE uint32_t LessThan1024(uint32_t bits) {
  return FmaHalf2(bits | kHalf1024, kHalfOne, kHalfMinus1024);
}

// Return the FP16 scales that turn expanded FP4 codes into the value times 2^-8. With kHardware,
// codes expand to 2^14 times as much, and the scales give twice the value for MXFP4 and the value
// itself for NVFP4. REQUIRES: IsLegalScale (codec.h). Other bytes give arbitrary values.
template <bool kHardware>
TM_DEVICE uint32_t MxScales(uint32_t halves) {       // each byte in 16 bits
  constexpr uint32_t kBias = kHardware ? 111 : 106;  // the exponent field is byte - kBias
  return halves * 1024u - kBias * 1024u * 0x10001u;
}
template <bool kHardware>
TM_DEVICE uint32_t NvScales(uint32_t bytes) {  // the two bytes in the low half
  constexpr uint32_t k64 = 0x54005400u;
  const uint32_t pair = E4m3PairToHalf2(bytes);
  return kHardware ? pair : MulHalf2(pair, k64);
}

// The scales of two bytes.
template <KvCacheMode M, bool kHardware = false>
TM_DEVICE uint32_t ScalePair(uint32_t low, uint32_t high) {
  if constexpr (M == KvCacheMode::kFp4Mx) {
    return MxScales<kHardware>(SelectBytes(low, high, 0x5410));
  } else {
    return NvScales<kHardware>(SelectBytes(low, high, 0x4440));
  }
}
// The scales of the two bytes of a 16-bit number. Without kPair, the scale of one byte, in the low
// half of the result.
template <KvCacheMode M, bool kHardware, bool kPair>
TM_DEVICE uint32_t ScalesOf(uint32_t bytes) {
  if constexpr (M == KvCacheMode::kFp4Mx) {
    return MxScales<kHardware>(kPair ? SelectBytes(bytes, 0, 0x4140) : bytes);
  } else {
    return NvScales<kHardware>(bytes);
  }
}

template <KvCacheMode M, DataType T>
struct Fragments;

struct FourBits {
  static constexpr int kBits = 4;
  static constexpr int kDims = 8;
  static constexpr bool kBFloat = false;
  static TM_HD constexpr int Low(int pair) { return pair; }
  static TM_HD constexpr int High(int pair) { return pair + 4; }
};

struct EightBits {
  static constexpr int kBits = 8;
  static constexpr int kDims = 4;
  static constexpr bool kBFloat = false;
  static TM_HD constexpr int Low(int pair) { return 2 * pair; }
  static TM_HD constexpr int High(int pair) { return 2 * pair + 1; }
};

template <KvCacheMode M, bool kOnGpu = kHasE2m1>
struct Fp4Fragments : FourBits {
  static constexpr bool kHardware = kOnGpu;
  static constexpr float kUnit = !kHardware ? 256.f : M == KvCacheMode::kFp4Mx ? 0.5f : 1.f;
  static TM_HD constexpr int Low(int pair) { return kHardware ? 2 * pair : pair; }
  static TM_HD constexpr int High(int pair) { return kHardware ? 2 * pair + 1 : pair + 4; }
  static TM_DEVICE void Expand(uint32_t word, uint32_t (&out)[4]) {
    if constexpr (kHardware) {
      E2m1ToHalf2(word, out);
    } else {
      ExpandE2m1(word, out);
    }
  }
  static TM_DEVICE void ExpandTokens(uint32_t a, uint32_t b, uint32_t (&out)[8]) {
    constexpr uint32_t kEven = 0x0f0f0f0fu;
    uint32_t half[2][4];
    if constexpr (kHardware) {
      E2m1ToHalf2((a & kEven) | (b << 4 & ~kEven), half[0]);
      E2m1ToHalf2((a >> 4 & kEven) | (b & ~kEven), half[1]);
    } else {
      ExpandE2m1(SelectBytes(a, b, 0x5410), half[0]);
      ExpandE2m1(SelectBytes(a, b, 0x7632), half[1]);
    }
    for (int i = 0; i < 8; ++i) {
      out[i] = kHardware ? half[i % 2][i / 2] : half[i / 4][i % 4];
    }
  }
};
template <DataType T>
struct Fragments<KvCacheMode::kFp4Mx, T> : Fp4Fragments<KvCacheMode::kFp4Mx> {};
template <DataType T>
struct Fragments<KvCacheMode::kFp4Nv, T> : Fp4Fragments<KvCacheMode::kFp4Nv> {};

template <DataType T>
struct Fragments<KvCacheMode::kInt4, T> : FourBits {
  static constexpr float kUnit = 1.f;
  static TM_DEVICE void Expand(uint32_t word, uint32_t (&out)[4]) {
    for (int i = 0; i < 4; ++i) {
      out[i] = LessThan1024(word >> (4 * i) & 0x000f000fu);
    }
  }
  static TM_DEVICE void ExpandTokens(uint32_t a, uint32_t b, uint32_t (&out)[8]) {
    const uint32_t low = SelectBytes(a, b, 0x5410);
    const uint32_t high = SelectBytes(a, b, 0x7632);
    for (int i = 0; i < 4; ++i) {
      out[i] = LessThan1024(low >> (4 * i) & 0x000f000fu);
      out[4 + i] = LessThan1024(high >> (4 * i) & 0x000f000fu);
    }
  }
};

template <DataType T>
struct Fragments<KvCacheMode::kInt8, T> : EightBits {
  static constexpr float kUnit = 1.f;
  static TM_DEVICE void Expand(uint32_t word, uint32_t (&out)[2]) {
    out[0] = LessThan1024(SelectBytes(word, 0, 0x4140));
    out[1] = LessThan1024(SelectBytes(word, 0, 0x4342));
  }
  static TM_DEVICE void ExpandTokens(uint32_t a, uint32_t b, uint32_t (&out)[4]) {
    const uint32_t low = SelectBytes(a, b, 0x5140);   // a0 b0 a1 b1
    const uint32_t high = SelectBytes(a, b, 0x7362);  // a2 b2 a3 b3
    out[0] = LessThan1024(SelectBytes(low, 0, 0x4140));
    out[1] = LessThan1024(SelectBytes(low, 0, 0x4342));
    out[2] = LessThan1024(SelectBytes(high, 0, 0x4140));
    out[3] = LessThan1024(SelectBytes(high, 0, 0x4342));
  }
};

// Convert two codes in the low half of `codes` to FP16.
template <bool kE4m3>
TM_DEVICE uint32_t Fp8Pair(uint32_t codes) {
  return kE4m3 ? E4m3PairToHalf2(codes) : SelectBytes(codes, 0, 0x1404);
}

template <bool kE4m3>
struct Fp8Fragments : EightBits {
  static constexpr float kUnit = 1.f;
  static TM_DEVICE void Expand(uint32_t word, uint32_t (&out)[2]) {
    out[0] = Fp8Pair<kE4m3>(word);
    out[1] = Fp8Pair<kE4m3>(word >> 16);
  }
  static TM_DEVICE void ExpandTokens(uint32_t a, uint32_t b, uint32_t (&out)[4]) {
    const uint32_t low = SelectBytes(a, b, 0x5140);
    const uint32_t high = SelectBytes(a, b, 0x7362);
    out[0] = Fp8Pair<kE4m3>(low);
    out[1] = Fp8Pair<kE4m3>(low >> 16);
    out[2] = Fp8Pair<kE4m3>(high);
    out[3] = Fp8Pair<kE4m3>(high >> 16);
  }
};
template <DataType T>
struct Fragments<KvCacheMode::kFp8E4m3, T> : Fp8Fragments<true> {};
template <DataType T>
struct Fragments<KvCacheMode::kFp8E5m2, T> : Fp8Fragments<false> {};

template <DataType T>
struct Fragments<KvCacheMode::kNone, T> {
  static_assert(T != DataType::kFloat32, "FP32 caches are not supported on a GPU");
  static constexpr int kBits = 16;
  static constexpr int kDims = 2;
  static constexpr bool kBFloat = T == DataType::kBFloat16;
  static constexpr float kUnit = 1.f;
  static TM_HD constexpr int Low(int) { return 0; }
  static TM_HD constexpr int High(int) { return 1; }
  static TM_DEVICE void Expand(uint32_t word, uint32_t (&out)[1]) { out[0] = word; }
  static TM_DEVICE void ExpandTokens(uint32_t a, uint32_t b, uint32_t (&out)[2]) {
    out[0] = SelectBytes(a, b, 0x5410);
    out[1] = SelectBytes(a, b, 0x7632);
  }
};

// Convert a value of the cache dtype, keeping the bits of NaN.
template <DataType T>
TM_DEVICE float ToFloat(uint16_t bits) {
  return T == DataType::kBFloat16 ? BFloat16ToFloat(bits) : HalfToFloat(bits);
}

// (scale, zero) of a row of integer codes, as stored. Never NaN.
struct IntParam {
  float scale;
  float zero;
};
template <DataType T>
TM_DEVICE IntParam IntParamOf(uint32_t bits) {
  if constexpr (T == DataType::kBFloat16) {
    return {BitsFloat(bits << 16), BitsFloat(bits & 0xffff0000u)};
  } else {
    return {LowHalf(bits), HighHalf(bits)};
  }
}

// Return the global scale of a head, or 1 if `scales` is null.
TM_DEVICE float HeadScale(const float* scales, int head) {
  return scales != nullptr ? LoadGlobal(scales + head) : 1.f;
}

// c += a · b, as MmaHalf does.
template <bool kBFloat>
TM_DEVICE void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBFloat) {
    MmaBFloat(c, a, b0, b1);
  } else {
    MmaHalf(c, a, b0, b1);
  }
}

template <bool kBFloat>
TM_DEVICE uint32_t PackPair(float low, float high) {
  return kBFloat ? PackBFloat2(low, high) : PackHalf2(low, high);
}

// Pack two FP16 values, clamped to a magnitude of 65504. NaN stays NaN.
TM_DEVICE uint32_t PackFiniteHalf2(float low, float high) {
  constexpr float kLimit = 65504.f;
  low = low > kLimit ? kLimit : low < -kLimit ? -kLimit : low;
  high = high > kLimit ? kLimit : high < -kLimit ? -kLimit : high;
  return PackHalf2(low, high);
}

TM_HD constexpr bool IsInteger(KvCacheMode m) {
  return m == KvCacheMode::kInt4 || m == KvCacheMode::kInt8;
}

}  // namespace turbomind::cuda
