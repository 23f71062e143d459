#pragma once

// ⑥ Encodes rows into codes and scales, with eight consecutive values in each lane. The results are
// bit-identical to the definition in kv/codec.h, even if the compiler contracts sums (MulRounded).
//
// A row is a run of kRowLanes lanes (8, 16 or 32) of one warp. Lanes whose first value is at or
// past n hold nothing. All lanes of the warp call these functions together, with rows of one
// format.
//
// With 64 lanes, a row has two pieces: each thread of the warp has the lanes t and t + 32.
//
// REQUIRES: n is a multiple of 16; global_scale is between 2^-64 and 2^64
// (KvCache::SetGlobalScales).

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/kv/fragments.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {

inline constexpr int kLaneValues = 8;
inline constexpr uint32_t kInfinityBits = 0x7F800000u;

// The threads of a row of this many lanes, and the lanes of each.
TM_HD constexpr int RowThreads(int row_lanes) { return row_lanes < 32 ? row_lanes : 32; }
TM_HD constexpr int RowPieces(int row_lanes) { return row_lanes / RowThreads(row_lanes); }

// Lane 0 holds the values [0, 8) of a row.
struct RowLane {
  int lane;
  int n;
  // Return the thread's lane of a piece. REQUIRES: this is its lane of the first one.
  TM_DEVICE RowLane Piece(int piece) const { return {lane + 32 * piece, n}; }
  TM_DEVICE int first() const { return kLaneValues * lane; }
  TM_DEVICE bool active() const { return first() < n; }
};

struct LaneValues {
  uint32_t pairs[kLaneValues / 2];
  float value[kLaneValues];
  uint32_t top;  // bits of the largest magnitude, with NaN above infinity above numbers
  TM_DEVICE bool has_nonfinite() const { return top >= kInfinityBits; }
};

TM_DEVICE uint32_t SignBit(float x) { return FloatBits(x) & 0x80000000u; }

// Return x with the sign of `sign`. REQUIRES: x >= 0.
TM_DEVICE float WithSign(float x, float sign) { return BitsFloat(FloatBits(x) | SignBit(sign)); }

// Return x + y, or x if it is NaN. A GPU's sum of NaN loses its sign, which FP4 stores.
TM_DEVICE float AddToNumber(float x, float y) { return IsNan(x) ? x : x + y; }

template <DataType T>
TM_DEVICE void Unpack(LaneValues& to) {
  to.top = 0;
#pragma unroll
  for (int p = 0; p < kLaneValues / 2; ++p) {
    if constexpr (T == DataType::kBFloat16) {
      to.value[2 * p] = BitsFloat(to.pairs[p] << 16);
      to.value[2 * p + 1] = BitsFloat(to.pairs[p] & 0xffff0000u);
    } else {
      to.value[2 * p] = LowHalf(to.pairs[p]);
      to.value[2 * p + 1] = HighHalf(to.pairs[p]);
    }
    for (int i = 2 * p; i < 2 * p + 2; ++i) {
      const uint32_t size = FloatBits(to.value[i]) & 0x7FFFFFFFu;
      to.top = size > to.top ? size : to.top;
    }
  }
}

template <DataType T>
TM_DEVICE LaneValues RoundLane(const float (&x)[kLaneValues]) {
  constexpr bool kBFloat = T == DataType::kBFloat16;
  LaneValues out;
#pragma unroll
  for (int p = 0; p < kLaneValues / 2; ++p) {
    out.pairs[p] =
        kBFloat ? PackBFloat2(x[2 * p], x[2 * p + 1]) : PackHalf2(x[2 * p], x[2 * p + 1]);
  }
  Unpack<T>(out);
  if (out.has_nonfinite()) {  // the hardware has one NaN, the codec keeps more bits of each
#pragma unroll
    for (int p = 0; p < kLaneValues / 2; ++p) {
      const auto code = [](float v) {
        return static_cast<uint32_t>(kBFloat ? FloatToBFloat16(v) : FloatToHalf(v));
      };
      out.pairs[p] = code(x[2 * p]) | code(x[2 * p + 1]) << 16;
    }
  }
  return out;
}

TM_DEVICE int CountNonfinite(const LaneValues& x) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    count += !IsFinite(x.value[i]);
  }
  return count;
}

// Adds the finite values beyond the format's limit to a counter. Few lanes have any.
TM_DEVICE void AddClipped(const LaneValues& x, KvCacheMode format, float global_scale,
                          int64_t* counter) {
  const float limit = ClipLimit(format, global_scale);
  if (x.top <= FloatBits(limit) || counter == nullptr) {
    return;
  }
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    count += IsFinite(x.value[i]) && Magnitude(x.value[i]) > limit;
  }
  if (count > 0) {
    AddGlobal(counter, count);
  }
}

// Copy the values that determine scales: NaN becomes 0, infinities become the largest finite value.
template <DataType T>
TM_DEVICE void FiniteValues(const LaneValues& x, float (&finite)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    finite[i] = x.value[i];
  }
  if (x.has_nonfinite()) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      finite[i] = FiniteValue(x.value[i], T);
    }
  }
}

// A divisor for many values. REQUIRES: value is between 2^-80 and 2^124.
struct Divisor {
  float value;
  float inverse;  // of value, rounded to nearest
};

TM_DEVICE Divisor MakeDivisor(float value) { return {value, 1.f / value}; }

// Return min(size / divisor, limit) with IEEE rounding if that is at least 2^-20, and some value
// below 2^-19 otherwise. Two correction steps are needed. After the first, the quotient is one of
// the two neighbors of the exact one. From that and the nearest inverse, the second step rounds
// correctly. REQUIRES: size >= 0 or NaN, which gives the limit; limit * divisor is finite.
TM_DEVICE float Quotient(float size, const Divisor& divisor, float limit) {
  const float x = fminf(size, limit * divisor.value);
  float q = x * divisor.inverse;
  q = fmaf(fmaf(-q, divisor.value, x), divisor.inverse, q);
  return fmaf(fmaf(-q, divisor.value, x), divisor.inverse, q);
}

// The E2M1 value nearest to x; ties go to the even code. Adding 1.5 * 2^22 times x's binade leaves
// one bit after the leading one. Below 1 the steps stay 0.5.
struct NearestE2m1 {
  uint32_t binade;  // bits of the power of two, at least 1
  uint32_t magic;
  float sum;
  // REQUIRES: 0 <= x < 7.
  TM_DEVICE explicit NearestE2m1(float x) {
    binade = FloatBits(fmaxf(x, 1.f)) & kInfinityBits;
    magic = binade + (22u << 23) + 0x400000u;
    sum = x + BitsFloat(magic);
  }
  TM_DEVICE float value() const { return sum - BitsFloat(magic); }
  // Codes count the steps: steps of 0.5 up to 2, then of 1, then of 2.
  TM_DEVICE uint32_t code() const {
    return FloatBits(sum) - magic + ((binade - (127u << 23)) >> 22);
  }
};

// Return two codes in a byte. REQUIRES: magnitudes below 7.
template <bool kHardware = kHasE2m1>
TM_DEVICE uint32_t E2m1Byte(float low, float high) {
  if constexpr (kHardware) {
    return PackE2m1(low, high);
  } else {
    const uint32_t codes = NearestE2m1(Magnitude(low)).code() | NearestE2m1(Magnitude(high)).code()
                                                                    << 4;
    return codes | SignBit(low) >> 28 | SignBit(high) >> 24;
  }
}

inline constexpr float kE2m1Max = 6.f;

template <class Scale>
inline constexpr bool kPowersOfTwo = std::is_same_v<Scale, MxScale>;

// Return the quotient by a group's divisor, at most 6.
template <class Scale>
TM_DEVICE float ScaleQuotient(float size, const Divisor& divisor) {
  return kPowersOfTwo<Scale> ? fminf(size * divisor.inverse, kE2m1Max)
                             : Quotient(size, divisor, kE2m1Max);
}

// Return the squared error of a group's 16 values, summed in order. kShortScale means that
// global_scale is a power of two. Divisors then have at most 4 significant bits and values at most
// 11. So a quotient is either on a midpoint between two codes, or at least 2^-11 of its size away
// from every midpoint. The product with the inverse therefore finds the right codes. On a midpoint
// it finds one of two codes with the same error. Decoded values are exact.
template <class Scale, bool kShortScale>
TM_DEVICE float SquaredError(const float (&size)[kFp4Group], int byte, float global_scale) {
  const Divisor divisor = MakeDivisor(Scale::Divisor(byte, global_scale));
  const float step = Scale::Divisor(byte, 1.f);
  float error = 0.f;
#pragma unroll
  for (int i = 0; i < kFp4Group; ++i) {
    float value;
    if constexpr (kShortScale) {
      const float q = fminf(size[i] * divisor.inverse, kE2m1Max);
      value = MulRounded(NearestE2m1(q).value(), divisor.value);
    } else {
      const float q = ScaleQuotient<Scale>(size[i], divisor);
      value = MulRounded(MulRounded(NearestE2m1(q).value(), step), global_scale);
    }
    const float difference = size[i] - value;
    error = error + MulRounded(difference, difference);
  }
  return error;
}

// Fp4Codec::SearchByte for the group that lanes 2i and 2i + 1 hold. Each lane tries one half of the
// candidates on all 16 values.
template <class Scale>
TM_DEVICE int SearchByte(const float (&size)[kLaneValues], int plain, float global_scale) {
  constexpr int kHalf = Scale::kCandidates / 2;
  const bool odd = (ThreadIndexX() & 1) != 0;
  const bool short_scale = kPowersOfTwo<Scale> || (FloatBits(global_scale) & 0x7FFFFFu) == 0;
  float all[kFp4Group];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    const float other = ShuffleXor(size[i], 1);
    all[i] = odd ? other : size[i];
    all[kLaneValues + i] = odd ? size[i] : other;
  }
  int best = plain;
  float min_error = BitsFloat(kInfinityBits);
#pragma unroll 1
  for (int k = 0; k < kHalf; ++k) {
    const int byte = Scale::Candidate(plain, odd ? kHalf + k : k);
    const float error = short_scale ? SquaredError<Scale, true>(all, byte, global_scale)
                                    : SquaredError<Scale, false>(all, byte, global_scale);
    best = error < min_error ? byte : best;
    min_error = error < min_error ? error : min_error;
  }
  const float other_error = ShuffleXor(min_error, 1);
  const int other_best = static_cast<int>(ShuffleXor(static_cast<float>(best), 1));
  // Ties go to the even lane, whose candidates come first.
  return (odd ? other_error <= min_error : other_error < min_error) ? other_best : best;
}

struct Fp4Lane {
  uint32_t codes;
  int byte;  // of the group
};

template <class Scale, DataType T>
TM_DEVICE Fp4Lane EncodeFp4(const LaneValues& x, float global_scale, bool search) {
  float size[kLaneValues];
  FiniteValues<T>(x, size);
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    size[i] = Magnitude(size[i]);
    amax = fmaxf(amax, size[i]);
  }
  amax = fmaxf(amax, ShuffleXor(amax, 1));
  Fp4Lane out = {0, amax > 0.f ? Scale::PlainByte(amax, global_scale) : Scale::kZeroBlock};
  if (search) {
    const int found = SearchByte<Scale>(size, out.byte, global_scale);
    out.byte = amax > 0.f ? found : Scale::kZeroBlock;
  }
  const Divisor divisor = MakeDivisor(Scale::Divisor(out.byte, global_scale));
#pragma unroll
  for (int p = 0; p < kLaneValues / 2; ++p) {
    float q[2];
    for (int i = 0; i < 2; ++i) {
      float value = x.value[2 * p + i];
      if (x.has_nonfinite() && IsNan(value)) {  // NaN becomes 6, as infinity does
        value = BitsFloat(kInfinityBits);
      }
      q[i] = WithSign(ScaleQuotient<Scale>(Magnitude(value), divisor), value);
    }
    out.codes |= E2m1Byte(q[0], q[1]) << (8 * p);
  }
  out.codes = amax > 0.f ? out.codes : 0u;
  return out;
}

template <bool kE4m3>
TM_DEVICE Words<8> EncodeFp8(const LaneValues& x, float global_scale) {
  constexpr float kLimit = kE4m3 ? 512.f : 65536.f;
  const Divisor divisor = MakeDivisor(global_scale);
  Words<8> out = {};
#pragma unroll
  for (int p = 0; p < kLaneValues / 2; ++p) {
    float q[2];
    for (int i = 0; i < 2; ++i) {
      const float value = x.value[2 * p + i];
      q[i] = WithSign(Quotient(Magnitude(value), divisor, kLimit), value);
    }
    out.v[p / 2] |= (kE4m3 ? PackE4m3(q[0], q[1]) : PackE5m2(q[0], q[1])) << (16 * (p % 2));
  }
  if (x.has_nonfinite()) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const int shift = 8 * (i % 4);
      if (IsNan(x.value[i])) {
        out.v[i / 4] = (out.v[i / 4] & ~(0xffu << shift)) | 0x7fu << shift;
      }
    }
  }
  return out;
}

template <int kIntBits>
struct IntLane {
  Words<kIntBits> codes;
  float scale;
  float zero;
};

struct ValueRange {
  float min;
  float max;
};

// Return the range of a lane's values. Lanes that hold nothing return the empty one.
template <DataType T>
TM_DEVICE ValueRange RangeOfLane(const LaneValues& x, const RowLane& at) {
  float finite[kLaneValues];
  FiniteValues<T>(x, finite);
  ValueRange range = {at.active() ? finite[0] : BitsFloat(kInfinityBits),
                      at.active() ? finite[0] : -BitsFloat(kInfinityBits)};
#pragma unroll
  for (int i = 1; i < kLaneValues; ++i) {
    range.min = at.active() ? fminf(range.min, finite[i]) : range.min;
    range.max = at.active() ? fmaxf(range.max, finite[i]) : range.max;
  }
  return range;
}

// Return the range of the lanes of a row.
template <int kRowLanes>
TM_DEVICE ValueRange RangeOfRow(ValueRange range) {
#pragma unroll
  for (int mask = 1; mask < kRowLanes; mask *= 2) {
    range.min = fminf(range.min, ShuffleXor(range.min, mask));
    range.max = fmaxf(range.max, ShuffleXor(range.max, mask));
  }
  return range;
}

// Encode a lane's values of a row with this range.
template <int kIntBits, DataType T>
TM_DEVICE IntLane<kIntBits> EncodeIntIn(const ValueRange& range_of_row, const LaneValues& x,
                                        const RowLane& at) {
  using Definition = IntCodec<kIntBits>;
  float finite[kLaneValues];
  FiniteValues<T>(x, finite);
  IntLane<kIntBits> out = {};
  out.zero = range_of_row.min + 0.f;
  const float range = range_of_row.max - range_of_row.min + 0.f;  // not -0, whatever zeros it has
  out.scale =
      RoundTo((range < Definition::kWidest ? range : Definition::kWidest) / Definition::kLevels, T);
  if (!(out.scale > 0.f) || !at.active()) {
    return out;
  }
  constexpr float kFew = 0x1p-64f;  // below this scale, both operands of the division are scaled up
  const float unit = out.scale < kFew ? 1.f / kFew : 1.f;
  const Divisor divisor = MakeDivisor(out.scale * unit);
  constexpr float kLimit = Definition::kLevels + 1.f;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    const float above = fminf(finite[i] - out.zero, kLimit * out.scale);
    const float steps = fminf(Quotient(above * unit, divisor, kLimit), Definition::kLevels);
    const auto code = static_cast<uint32_t>(RoundSmall(steps));
    out.codes.v[i * kIntBits / 32] |= code << (i * kIntBits % 32);
  }
  return out;
}

// Return the range of a row.
template <int kRowLanes, DataType T>
TM_DEVICE ValueRange RangeOfPieces(const LaneValues (&x)[RowPieces(kRowLanes)], const RowLane& at) {
  ValueRange range = RangeOfLane<T>(x[0], at);
#pragma unroll
  for (int piece = 1; piece < RowPieces(kRowLanes); ++piece) {
    const ValueRange next = RangeOfLane<T>(x[piece], at.Piece(piece));
    range = {fminf(range.min, next.min), fmaxf(range.max, next.max)};
  }
  return RangeOfRow<RowThreads(kRowLanes)>(range);
}

}  // namespace turbomind::cuda
