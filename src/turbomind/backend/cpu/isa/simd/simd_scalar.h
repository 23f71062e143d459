#pragma once

// The operations of simd.h in plain C++: the readable definition of each of them.

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

struct F32x16 {
  float v[16];
};
struct I32x16 {
  int32_t v[16];
};
struct Mask16 {
  bool v[16];
};
struct Table16 {
  float v[16];
};

template <class R, class F>
TM_HD R EachLane(F fn) {
  R r;
  for (int i = 0; i < 16; ++i) {
    r.v[i] = fn(i);
  }
  return r;
}

TM_HD F32x16 Set1(float x) {
  return EachLane<F32x16>([&](int) { return x; });
}
TM_HD F32x16 Load(const float* p) {
  return EachLane<F32x16>([&](int i) { return p[i]; });
}
TM_HD void Store(float* p, const F32x16& a) { __builtin_memcpy(p, a.v, sizeof(a.v)); }
TM_HD F32x16 Add(const F32x16& a, const F32x16& b) {
  return EachLane<F32x16>([&](int i) { return a.v[i] + b.v[i]; });
}
TM_HD F32x16 Sub(const F32x16& a, const F32x16& b) {
  return EachLane<F32x16>([&](int i) { return a.v[i] - b.v[i]; });
}
TM_HD F32x16 Mul(const F32x16& a, const F32x16& b) {
  return EachLane<F32x16>([&](int i) { return a.v[i] * b.v[i]; });
}
TM_HD F32x16 Div(const F32x16& a, const F32x16& b) {
  return EachLane<F32x16>([&](int i) { return a.v[i] / b.v[i]; });
}
// Returns a * b + c, rounded once.
TM_HD F32x16 Fma(const F32x16& a, const F32x16& b, const F32x16& c) {
  return EachLane<F32x16>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
// Returns a > b ? a : b, which is b if either is NaN.
TM_HD F32x16 Max(const F32x16& a, const F32x16& b) {
  return EachLane<F32x16>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
// Returns a < b ? a : b, which is b if either is NaN.
TM_HD F32x16 Min(const F32x16& a, const F32x16& b) {
  return EachLane<F32x16>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
TM_HD void KeepOrder(F32x16& /*x*/) {}
TM_HD float First(const F32x16& a) { return a.v[0]; }

TM_HD I32x16 Set1Int(int32_t x) {
  return EachLane<I32x16>([&](int) { return x; });
}
TM_HD I32x16 LoadInt(const void* p) {
  I32x16 r;
  __builtin_memcpy(r.v, p, sizeof(r.v));
  return r;
}
TM_HD void StoreInt(void* p, const I32x16& a) { __builtin_memcpy(p, a.v, sizeof(a.v)); }
TM_HD I32x16 Bits(const F32x16& a) { return LoadInt(a.v); }
TM_HD F32x16 FromBits(const I32x16& a) {
  F32x16 r;
  __builtin_memcpy(r.v, a.v, sizeof(r.v));
  return r;
}
TM_HD F32x16 ToFloat(const I32x16& a) {
  return EachLane<F32x16>([&](int i) { return static_cast<float>(a.v[i]); });
}
// Rounds to the nearest integer, ties to even. Returns 0x80000000 if it does not fit.
TM_HD I32x16 ToInt(const F32x16& a) {
  return EachLane<I32x16>([&](int i) {
    const float x = __builtin_rintf(a.v[i]);
    return x >= -2147483648.f && x < 2147483648.f ? static_cast<int32_t>(x)
                                                  : static_cast<int32_t>(0x80000000u);
  });
}
TM_HD int32_t Wrap(uint32_t x) { return static_cast<int32_t>(x); }
TM_HD uint32_t Unsigned(int32_t x) { return static_cast<uint32_t>(x); }
TM_HD I32x16 Add(const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return Wrap(Unsigned(a.v[i]) + Unsigned(b.v[i])); });
}
TM_HD I32x16 Sub(const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return Wrap(Unsigned(a.v[i]) - Unsigned(b.v[i])); });
}
TM_HD I32x16 And(const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return a.v[i] & b.v[i]; });
}
TM_HD I32x16 Or(const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return a.v[i] | b.v[i]; });
}
TM_HD I32x16 Xor(const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return a.v[i] ^ b.v[i]; });
}
TM_HD I32x16 MaxInt(const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
TM_HD I32x16 MinInt(const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
template <int N>
TM_HD I32x16 ShiftLeft(const I32x16& a) {
  return EachLane<I32x16>([&](int i) { return Wrap(Unsigned(a.v[i]) << N); });
}
// Shifts in zeros.
template <int N>
TM_HD I32x16 ShiftRight(const I32x16& a) {
  return EachLane<I32x16>([&](int i) { return Wrap(Unsigned(a.v[i]) >> N); });
}
TM_HD I32x16 ShiftRight(const I32x16& a, const I32x16& counts) {
  return EachLane<I32x16>([&](int i) { return Wrap(Unsigned(a.v[i]) >> counts.v[i]); });
}

TM_HD Mask16 Less(const F32x16& a, const F32x16& b) {
  return EachLane<Mask16>([&](int i) { return a.v[i] < b.v[i]; });
}
TM_HD Mask16 Equal(const I32x16& a, const I32x16& b) {
  return EachLane<Mask16>([&](int i) { return a.v[i] == b.v[i]; });
}
// Compares signed integers.
TM_HD Mask16 Less(const I32x16& a, const I32x16& b) {
  return EachLane<Mask16>([&](int i) { return a.v[i] < b.v[i]; });
}
// Returns the mask of the lanes lo <= lane < hi.
TM_HD Mask16 LaneRange(int lo, int hi) {
  return EachLane<Mask16>([&](int i) { return lo <= i && i < hi; });
}
TM_HD int Count(const Mask16& m) {
  int n = 0;
  for (int i = 0; i < 16; ++i) {
    n += m.v[i];
  }
  return n;
}
// Returns lane i as bit i.
TM_HD unsigned MaskBits(const Mask16& m) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) {
    bits |= static_cast<unsigned>(m.v[i]) << i;
  }
  return bits;
}
TM_HD F32x16 Select(const Mask16& m, const F32x16& a, const F32x16& b) {
  return EachLane<F32x16>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
}
TM_HD I32x16 Select(const Mask16& m, const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
}

// Reduces by halves: ((i + i+8) + (i+4 + i+12)) and so on, until one lane is left.
template <class F>
TM_HD float Halve(const F32x16& a, F fn) {
  F32x16 r = a;
  for (int n = 8; n >= 1; n /= 2) {
    for (int i = 0; i < n; ++i) {
      r.v[i] = fn(r.v[i], r.v[i + n]);
    }
  }
  return r.v[0];
}
TM_HD float ReduceAdd(const F32x16& a) {
  return Halve(a, [](float x, float y) { return x + y; });
}
TM_HD float ReduceMax(const F32x16& a) {
  return Halve(a, [](float x, float y) { return x > y ? x : y; });
}
TM_HD float ReduceMin(const F32x16& a) {
  return Halve(a, [](float x, float y) { return x < y ? x : y; });
}

// Returns lane i ^ kDistance in lane i. REQUIRES: kDistance is a power of two below 16.
template <int kDistance>
TM_HD F32x16 SwapLanes(const F32x16& a) {
  return EachLane<F32x16>([&](int i) { return a.v[i ^ kDistance]; });
}
// Moves lane k to lane 2k and lane 8 + k to lane 2k + 1. Deinterleave is the inverse.
TM_HD F32x16 Interleave(const F32x16& a) {
  return EachLane<F32x16>([&](int i) { return a.v[(i >> 1) + ((i & 1) << 3)]; });
}
TM_HD F32x16 Deinterleave(const F32x16& a) {
  return EachLane<F32x16>([&](int i) { return a.v[i < 8 ? 2 * i : 2 * i - 15]; });
}

TM_HD I32x16 LoadBytes(const void* p) {
  return EachLane<I32x16>([&](int i) { return static_cast<const uint8_t*>(p)[i]; });
}
TM_HD void StoreBytes(void* p, const I32x16& a) {
  for (int i = 0; i < 16; ++i) {
    static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(a.v[i]);
  }
}
TM_HD I32x16 LoadShorts(const void* p) {
  uint16_t s[16];
  __builtin_memcpy(s, p, sizeof(s));
  return EachLane<I32x16>([&](int i) { return s[i]; });
}
TM_HD void StoreShorts(void* p, const I32x16& a) {
  uint16_t s[16];
  for (int i = 0; i < 16; ++i) {
    s[i] = static_cast<uint16_t>(a.v[i]);
  }
  __builtin_memcpy(p, s, sizeof(s));
}
// Stores 16 codes below 16 as 8 bytes, with code 2i in the low nibble of byte i.
TM_HD void StoreNibbles(void* p, const I32x16& codes) {
  for (int i = 0; i < 8; ++i) {
    static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(codes.v[2 * i] | codes.v[2 * i + 1] << 4);
  }
}
// Converts the low 16 bits of each lane from FP16.
TM_HD F32x16 HalfToFloat(const I32x16& a) {
  return EachLane<F32x16>([&](int i) {
    const uint32_t sign = (Unsigned(a.v[i]) & 0x8000u) << 16;
    const uint32_t rest = (Unsigned(a.v[i]) & 0x7fffu) << 13;
    uint32_t bits;
    if ((rest & 0x0f800000u) == 0x0f800000u) {
      // Return a quiet NaN, as the hardware conversion does.
      bits = rest | 0x70000000u | ((rest & 0x007fffffu) != 0 ? 0x00400000u : 0u);
    } else if (rest >= 0x00800000u) {
      bits = rest + 0x38000000u;
    } else {
      const float f = static_cast<float>(rest >> 13) * 0x1p-24f;
      __builtin_memcpy(&bits, &f, sizeof(bits));
    }
    bits |= sign;
    float f;
    __builtin_memcpy(&f, &bits, sizeof(f));
    return f;
  });
}
TM_HD F32x16 LoadHalf(const void* p) { return HalfToFloat(LoadShorts(p)); }
// Returns the bits of the nearest FP16, ties to even.
TM_HD I32x16 FloatToHalf(const F32x16& a) {
  return EachLane<I32x16>([&](int i) {
    uint32_t bits;
    __builtin_memcpy(&bits, &a.v[i], sizeof(bits));
    const uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    uint32_t half;
    if (bits > 0x7f800000u) {
      half = 0x7e00u | (bits >> 13 & 0x3ffu);
    } else if (bits >= 0x47800000u) {
      half = 0x7c00u;
    } else if (bits >= 0x38800000u) {
      const uint32_t rounded = bits + 0x0fffu + (bits >> 13 & 1u);
      half = (rounded - 0x38000000u) >> 13;
    } else {
      float x;  // adding 0.5 leaves multiples of 2^-24 in the low bits, rounded to even
      __builtin_memcpy(&x, &bits, sizeof(x));
      x += 0.5f;
      __builtin_memcpy(&half, &x, sizeof(half));
      half -= 0x3f000000u;
    }
    return Wrap(sign | half);
  });
}

TM_HD Table16 LoadTable(const float* p) {
  return EachLane<Table16>([&](int i) { return p[i]; });
}
// Returns table[lane & 15] in each lane.
TM_HD F32x16 Lookup(const Table16& t, const I32x16& index) {
  return EachLane<F32x16>([&](int i) { return t.v[index.v[i] & 15]; });
}

struct Table32 {
  float v[32];
};
TM_HD Table32 LoadTable32(const float* p) {
  Table32 t;
  __builtin_memcpy(t.v, p, sizeof(t.v));
  return t;
}
// Returns table[lane & 31] in each lane.
TM_HD F32x16 Lookup(const Table32& t, const I32x16& index) {
  return EachLane<F32x16>([&](int i) { return t.v[index.v[i] & 31]; });
}
// Rounds toward zero. Returns 0x80000000 if the result does not fit.
TM_HD I32x16 Truncate(const F32x16& a) {
  return EachLane<I32x16>([&](int i) {
    const float x = a.v[i];
    return x > -2147483648.f && x < 2147483648.f ? static_cast<int32_t>(x)
                                                 : static_cast<int32_t>(0x80000000u);
  });
}

TM_HD int32_t LoadDword(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return bits;
}
// Repeats eight bytes: even lanes hold the first four, odd lanes the last four.
TM_HD I32x16 Broadcast8(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  return EachLane<I32x16>([&](int i) { return LoadDword(bytes + 4 * (i & 1)); });
}
// Loads the even or odd ones of 32 dwords.
template <int kOdd>
TM_HD I32x16 LoadEverySecond(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  return EachLane<I32x16>([&](int i) { return LoadDword(bytes + 8 * i + 4 * kOdd); });
}
// Loads the dword at p + i * stride into lane i.
TM_HD I32x16 GatherDwords(const void* p, int stride) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  return EachLane<I32x16>([&](int i) { return LoadDword(bytes + i * stride); });
}
// Loads 16 rows of 16 bytes: lane i of out[c] is dword c of row i.
TM_HD void LoadTransposed(const uint8_t* p, int64_t stride, I32x16 (&out)[4]) {
  for (int c = 0; c < 4; ++c) {
    out[c] = EachLane<I32x16>([&](int i) { return LoadDword(p + i * stride + 4 * c); });
  }
}

// Lanes as pairs of int16: the low and the high half of a dword.

struct ShortTable {
  int16_t v[16];
};
TM_HD ShortTable LoadShortTable(const int16_t* p) {
  ShortTable t;
  __builtin_memcpy(t.v, p, sizeof(t.v));
  return t;
}
TM_HD int32_t MakePair(int32_t low, int32_t high) {
  return Wrap((Unsigned(low) & 0xffffu) | Unsigned(high) << 16);
}
// Returns table[half & 15] in each half.
TM_HD I32x16 LookupPairs(const ShortTable& t, const I32x16& index) {
  return EachLane<I32x16>(
      [&](int i) { return MakePair(t.v[index.v[i] & 15], t.v[Unsigned(index.v[i]) >> 16 & 15]); });
}
// Returns table[nibble K of the half] in each half.
template <int K>
TM_HD I32x16 LookupNibble(const ShortTable& t, const I32x16& words) {
  return LookupPairs(t, ShiftRight<4 * K>(words));
}
// Returns sum + a.low * b.low + a.high * b.high.
TM_HD I32x16 DotPairs(const I32x16& sum, const I32x16& a, const I32x16& b) {
  return EachLane<I32x16>([&](int i) {
    const int32_t low = static_cast<int16_t>(a.v[i]) * static_cast<int16_t>(b.v[i]);
    const int32_t high = (a.v[i] >> 16) * (b.v[i] >> 16);
    return Wrap(Unsigned(sum.v[i]) + Unsigned(low) + Unsigned(high));
  });
}
// Loads 16 nibbles each from a (low halves) and b (high halves) into the low bits of each half. The
// bits above are undefined.
TM_HD I32x16 LoadNibblePairs(const void* a, const void* b) {
  const auto nibble = [](const void* p, int i) {
    return static_cast<const uint8_t*>(p)[i / 2] >> (4 * (i & 1)) & 15;
  };
  return EachLane<I32x16>([&](int i) { return MakePair(nibble(a, i), nibble(b, i)); });
}
// Loads 64 nibbles each from a (low halves) and b (high halves). Lane 4 j + g holds the nibbles
// 16 g + 4 j to 16 g + 4 j + 3 of both.
TM_HD I32x16 LoadNibbleRows(const uint8_t* a, const uint8_t* b) {
  const auto word = [](const uint8_t* p, int i) { return p[2 * i] | p[2 * i + 1] << 8; };
  return EachLane<I32x16>([&](int i) {
    const int at = 4 * (i % 4) + i / 4;
    return MakePair(word(a, at), word(b, at));
  });
}

// Lanes as four runs of four.

// Loads the dword p[i % 4] into lane i.
TM_HD I32x16 LoadQuad(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  return EachLane<I32x16>([&](int i) { return LoadDword(bytes + 4 * (i % 4)); });
}
// Transposes each run of four lanes, a matrix whose row r is in a[r].
TM_HD void TransposeQuads(I32x16 (&a)[4]) {
  I32x16 rows[4];
  __builtin_memcpy(rows, a, sizeof(rows));
  for (int r = 0; r < 4; ++r) {
    a[r] = EachLane<I32x16>([&](int i) { return rows[i % 4].v[i / 4 * 4 + r]; });
  }
}
// Packs each run: the four lanes of a as two pairs of int16, saturated, then those of b.
TM_HD I32x16 PackPairs(const I32x16& a, const I32x16& b) {
  const auto saturated = [](int32_t x) { return x < -32768 ? -32768 : x > 32767 ? 32767 : x; };
  return EachLane<I32x16>([&](int i) {
    const int32_t* from = (i % 4 < 2 ? a.v : b.v) + i / 4 * 4 + i % 2 * 2;
    return MakePair(saturated(from[0]), saturated(from[1]));
  });
}

}  // namespace turbomind::TM_ISA
