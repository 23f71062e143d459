#pragma once

// ⑥⑦ Defines the meaning of every byte in the KV cache, for host and device. Faster implementations
// must be bit-equal to it. Everything is always inlined and calls no library function, so it is
// safe in files compiled for a newer instruction set. Compile without FMA contraction
// (-ffp-contract=off, -fmad=false).
//
// Codec<M> has
//   kBits        payload bits per value
//   kGroup       values per scale byte; 0 if metadata is per row or absent
//   kHasParams   true for an inline (scale, zero) per row, in the cache dtype
//   kHasScales   true for scale bytes in the scale pool, n / kGroup per row
//   EncodeRow    Encodes x[n] into payload[n * kBits / 8] and meta. Returns the number of NaN and
//                infinite values. x is first rounded to `dtype`. `global_scale` is the FP32
//                global_scale of NVFP4 or the k_scale / v_scale of FP8, else 1. With kSearch, FP4
//                scales minimize the squared error; without it they follow the plain rule
//                (MxPlainByte, NvPlainByte).
//   DecodeRow    Decodes a row: the inverse of EncodeRow.
//   Value        Decodes one code, with its scale byte if there is one (floats only).
// meta is (scale, zero) for int8 and int4, and the scale bytes for FP4. Other formats do not access
// it. REQUIRES: n is even for 4-bit formats and a multiple of kGroup; global_scale > 0.

#include <cstdint>

#include "turbomind/core/dtype.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/core/host_device.h"
#include "turbomind/kv/kv_format.h"

namespace turbomind {

// Returns the value that counts for amax, min and max. NaN becomes 0, and an infinity becomes the
// largest finite value of its sign.
TM_HD float FiniteValue(float x, DataType dtype) {
  if (IsFinite(x)) {
    return x;
  }
  if (IsNan(x)) {
    return 0.f;
  }
  return x < 0.f ? -LargestFinite(dtype) : LargestFinite(dtype);
}

inline constexpr int kFp4Group = 16;
inline constexpr int kMxMinByte = 112;  // 2^-15; stored for a zero block
inline constexpr int kMxMaxByte = 136;  // 2^9
inline constexpr int kNvMinByte = 0x01;
inline constexpr int kNvMaxByte = 0x7E;

// Returns 2^(byte - 127), exact for every byte below 255 (byte 0 is subnormal).
TM_HD float MxStep(int byte) {
  return BitsFloat(byte ? static_cast<uint32_t>(byte) << 23 : 0x00400000u);
}

// Returns the scale byte of the smallest exponent e with amax <= 6 * 2^e, clamped to the stored
// range. REQUIRES: amax > 0.
TM_HD int MxPlainByte(float amax) {
  const uint32_t bits = FloatBits(amax);
  const int byte = static_cast<int>(bits >> 23) - 2 + ((bits & 0x7FFFFFu) > 0x400000u);
  return byte < kMxMinByte ? kMxMinByte : (byte > kMxMaxByte ? kMxMaxByte : byte);
}

// Returns the E4M3 code of amax / (6 global_scale), at least 0x01. REQUIRES: amax > 0.
TM_HD int NvPlainByte(float amax, float global_scale) {
  const int byte = FloatToE4M3(amax / (6.f * global_scale));
  return byte < kNvMinByte ? kNvMinByte : byte;
}

// Returns whether the encoder can store this scale byte. The integrity check rejects all others.
template <KvCacheMode M>
TM_HD bool IsLegalScale(uint8_t byte) {
  static_assert(M == KvCacheMode::kFp4Mx || M == KvCacheMode::kFp4Nv);
  return M == KvCacheMode::kFp4Mx ? (byte >= kMxMinByte && byte <= kMxMaxByte) : byte <= kNvMaxByte;
}

struct ClipLimitOf {
  // Constants of scalar type, so that device code can use the values.
  template <KvCacheMode M>
  static constexpr float kMaxValue = InfoOf(M).max_value;
  template <KvCacheMode M>
  static constexpr bool kIsScaled = HasGlobalScale(M);

  float global_scale;

  template <KvCacheMode M>
  TM_HD float operator()() const {
    const float largest = LargestFinite(DataType::kFloat32);
    const float limit = kMaxValue<M> * (kIsScaled<M> ? global_scale : 1.f);
    return kMaxValue<M> > 0.f && limit < largest ? limit : largest;
  }
};

// Returns the largest magnitude that a format can store with this global_scale. For none, int8 and
// int4, which have no fixed limit, it is the largest finite float.
TM_HD float ClipLimit(KvCacheMode format, float global_scale) {
  return DispatchFormat(format, ClipLimitOf{global_scale});
}

// Counts the finite values of a row, rounded to `dtype`, whose magnitude exceeds the limit.
TM_HD int CountClipped(const float* x, int n, DataType dtype, float limit) {
  int clipped = 0;
  for (int i = 0; i < n; ++i) {
    const float value = RoundTo(x[i], dtype);
    clipped += IsFinite(value) && Magnitude(value) > limit;
  }
  return clipped;
}

template <KvCacheMode M>
struct Codec;  // undefined, so that a format without a codec does not compile

template <>
struct Codec<KvCacheMode::kNone> {
  static constexpr int kBits = 16;
  static constexpr int kGroup = 0;
  static constexpr bool kHasParams = false;
  static constexpr bool kHasScales = false;

  template <bool kSearch = false>
  static TM_HD int EncodeRow(const float* x, int n, DataType dtype, float /*global_scale*/,
                             uint8_t* payload, uint8_t* /*meta*/) {
    int nonfinite = 0;
    for (int i = 0; i < n; ++i) {
      nonfinite += !IsFinite(RoundTo(x[i], dtype));
      StoreAs(x[i], dtype, payload, i);
    }
    return nonfinite;
  }

  static TM_HD void DecodeRow(const uint8_t* payload, const uint8_t* /*meta*/, int n,
                              DataType dtype, float /*global_scale*/, float* out) {
    for (int i = 0; i < n; ++i) {
      out[i] = LoadAs(payload, dtype, i);
    }
  }
};

// Asymmetric integers with one (scale, zero) per row.
template <int kIntBits>
struct IntCodec {
  static constexpr int kBits = kIntBits;
  static constexpr int kGroup = 0;
  static constexpr bool kHasParams = true;
  static constexpr bool kHasScales = false;
  static constexpr float kLevels = static_cast<float>((1 << kIntBits) - 1);
  // A wider row saturates here, so that scale, code * scale and their sum with zero stay finite.
  static constexpr float kWidest = 1.7014118346046923e38f;  // 2^127

  template <bool kSearch = false>
  static TM_HD int EncodeRow(const float* x, int n, DataType dtype, float /*global_scale*/,
                             uint8_t* payload, uint8_t* meta) {
    int nonfinite = 0;
    float min_value = 0.f;
    float max_value = 0.f;
    for (int i = 0; i < n; ++i) {
      const float rounded = RoundTo(x[i], dtype);
      const float value = FiniteValue(rounded, dtype);
      nonfinite += !IsFinite(rounded);
      min_value = i == 0 || value < min_value ? value : min_value;
      max_value = i == 0 || value > max_value ? value : max_value;
    }
    const float range = max_value - min_value;
    const float scale = RoundTo((range < kWidest ? range : kWidest) / kLevels, dtype);
    const float zero =
        min_value + 0.f;  // stores -0 as +0, so that the order of min does not matter
    StoreAs(scale, dtype, meta, 0);
    StoreAs(zero, dtype, meta, 1);
    for (int i = 0; i < n; ++i) {
      const float value = FiniteValue(RoundTo(x[i], dtype), dtype);
      Put(payload, i, scale > 0.f ? Quantize(value, scale, zero) : 0);
    }
    return nonfinite;
  }

  static TM_HD void DecodeRow(const uint8_t* payload, const uint8_t* meta, int n, DataType dtype,
                              float /*global_scale*/, float* out) {
    const float scale = LoadAs(meta, dtype, 0);
    const float zero = LoadAs(meta, dtype, 1);
    for (int i = 0; i < n; ++i) {
      const int code = kIntBits == 8 ? payload[i] : Nibble(payload, i);
      out[i] = static_cast<float>(code) * scale + zero;
    }
  }

  static TM_HD uint8_t Quantize(float value, float scale, float zero) {
    const float steps = (value - zero) / scale;
    return static_cast<uint8_t>(
        RoundSmall(steps > 0.f ? (steps < kLevels ? steps : kLevels) : 0.f));
  }

  static TM_HD void Put(uint8_t* payload, int i, uint8_t code) {
    if (kIntBits == 8) {
      payload[i] = code;
    } else if (i & 1) {
      payload[i >> 1] = static_cast<uint8_t>(payload[i >> 1] | (code << 4));
    } else {
      payload[i >> 1] = code;
    }
  }
};

template <>
struct Codec<KvCacheMode::kInt8> : IntCodec<8> {};
template <>
struct Codec<KvCacheMode::kInt4> : IntCodec<4> {};

// 8-bit floats with one FP32 scale (k_scale or v_scale) per layer and head.
template <bool kE4M3>
struct Fp8Codec {
  static constexpr int kBits = 8;
  static constexpr int kGroup = 0;
  static constexpr bool kHasParams = false;
  static constexpr bool kHasScales = false;

  template <bool kSearch = false>
  static TM_HD int EncodeRow(const float* x, int n, DataType dtype, float global_scale,
                             uint8_t* payload, uint8_t* /*meta*/) {
    int nonfinite = 0;
    for (int i = 0; i < n; ++i) {
      const float value = RoundTo(x[i], dtype);
      nonfinite += !IsFinite(value);
      payload[i] = kE4M3 ? FloatToE4M3(value / global_scale) : FloatToE5M2(value / global_scale);
    }
    return nonfinite;
  }

  static TM_HD void DecodeRow(const uint8_t* payload, const uint8_t* /*meta*/, int n,
                              DataType /*dtype*/, float global_scale, float* out) {
    for (int i = 0; i < n; ++i) {
      out[i] = Value(payload[i], 0, global_scale);
    }
  }

  static TM_HD float Value(uint8_t code, uint8_t /*scale*/, float global_scale) {
    return (kE4M3 ? E4M3ToFloat(code) : E5M2ToFloat(code)) * global_scale;
  }
};

template <>
struct Codec<KvCacheMode::kFp8E4m3> : Fp8Codec<true> {};
template <>
struct Codec<KvCacheMode::kFp8E5m2> : Fp8Codec<false> {};

// E2M1 values with one scale byte per 16. `Scale` supplies the zero block's byte, the candidates,
// the encoder's divisor and the value of a code.
template <class Scale>
struct Fp4Codec {
  static constexpr int kBits = 4;
  static constexpr int kGroup = kFp4Group;
  static constexpr bool kHasParams = false;
  static constexpr bool kHasScales = true;

  template <bool kSearch = false>
  static TM_HD int EncodeRow(const float* x, int n, DataType dtype, float global_scale,
                             uint8_t* payload, uint8_t* meta) {
    int nonfinite = 0;
    for (int i = 0; i < n; i += kGroup) {
      nonfinite +=
          EncodeGroup<kSearch>(x + i, dtype, global_scale, payload + i / 2, meta + i / kGroup);
    }
    return nonfinite;
  }

  static TM_HD void DecodeRow(const uint8_t* payload, const uint8_t* meta, int n,
                              DataType /*dtype*/, float global_scale, float* out) {
    for (int i = 0; i < n; ++i) {
      out[i] = Value(Nibble(payload, i), meta[i / kGroup], global_scale);
    }
  }

  static TM_HD float Value(uint8_t code, uint8_t scale, float global_scale) {
    return Scale::Value(code, scale, global_scale);
  }

  template <bool kSearch>
  static TM_HD int EncodeGroup(const float* x, DataType dtype, float global_scale, uint8_t* payload,
                               uint8_t* meta) {
    int nonfinite = 0;
    float amax = 0.f;
    float value[kGroup];   // rounded to the cache dtype
    float finite[kGroup];  // input of the scale choice
    for (int i = 0; i < kGroup; ++i) {
      value[i] = RoundTo(x[i], dtype);
      finite[i] = FiniteValue(value[i], dtype);
      nonfinite += !IsFinite(value[i]);
      amax = Magnitude(finite[i]) > amax ? Magnitude(finite[i]) : amax;
    }
    int byte = Scale::kZeroBlock;
    if (amax > 0.f) {
      byte = Scale::PlainByte(amax, global_scale);
      byte = kSearch ? SearchByte(finite, byte, global_scale) : byte;
    }
    *meta = static_cast<uint8_t>(byte);
    const float divisor = Scale::Divisor(byte, global_scale);
    for (int i = 0; i < kGroup; i += 2) {
      const uint8_t low = amax > 0.f ? FloatToE2M1(value[i] / divisor) : 0;
      const uint8_t high = amax > 0.f ? FloatToE2M1(value[i + 1] / divisor) : 0;
      payload[i / 2] = static_cast<uint8_t>(low | (high << 4));
    }
    return nonfinite;
  }

  // Returns the candidate with the smallest squared error. Errors are summed in order in FP32; ties
  // go to the first candidate.
  static TM_HD int SearchByte(const float* finite, int plain, float global_scale) {
    int best = plain;
    float min_error = BitsFloat(0x7F800000u);
    for (int k = 0; k < Scale::kCandidates; ++k) {
      const int byte = Scale::Candidate(plain, k);
      const float divisor = Scale::Divisor(byte, global_scale);
      float error = 0.f;
      for (int i = 0; i < kGroup; ++i) {
        const uint8_t code = FloatToE2M1(finite[i] / divisor);
        const float difference =
            finite[i] - Scale::Value(code, static_cast<uint8_t>(byte), global_scale);
        error = error + difference * difference;
      }
      best = error < min_error ? byte : best;
      min_error = error < min_error ? error : min_error;
    }
    return best;
  }
};

struct MxScale {
  static constexpr int kZeroBlock = kMxMinByte;
  static constexpr int kCandidates = 2;
  static TM_HD int PlainByte(float amax, float /*global_scale*/) { return MxPlainByte(amax); }
  static TM_HD int Candidate(int plain, int k) {
    return plain - k < kMxMinByte ? kMxMinByte : plain - k;
  }
  static TM_HD float Divisor(int byte, float /*global_scale*/) { return MxStep(byte); }
  static TM_HD float Value(uint8_t code, uint8_t byte, float /*global_scale*/) {
    return E2M1ToFloat(code) * MxStep(byte);
  }
};

struct NvScale {
  static constexpr int kZeroBlock = 0;
  static constexpr int kCandidates = 8;
  static TM_HD int PlainByte(float amax, float global_scale) {
    return NvPlainByte(amax, global_scale);
  }
  // Offsets 0, -1, -2, +1, +2, +3, +4, +5.
  static TM_HD int Candidate(int plain, int k) {
    const int byte = plain + (k <= 2 ? -k : k - 2);
    return byte < kNvMinByte ? kNvMinByte : (byte > kNvMaxByte ? kNvMaxByte : byte);
  }
  static TM_HD float Divisor(int byte, float global_scale) {
    return E4M3ToFloat(static_cast<uint8_t>(byte)) * global_scale;
  }
  static TM_HD float Value(uint8_t code, uint8_t byte, float global_scale) {
    return E2M1ToFloat(code) * E4M3ToFloat(byte) * global_scale;
  }
};

template <>
struct Codec<KvCacheMode::kFp4Mx> : Fp4Codec<MxScale> {};
template <>
struct Codec<KvCacheMode::kFp4Nv> : Fp4Codec<NvScale> {};

}  // namespace turbomind
