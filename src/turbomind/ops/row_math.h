#pragma once

// ⑧ Arithmetic over one row of logits, shared by sampling and log-probabilities.

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace turbomind {

inline constexpr float kMasked = -std::numeric_limits<float>::infinity();
inline constexpr int kRowLanes = 16;

// Four values in a register of any x86-64 or ARM64 CPU. Explicit vectors are needed because
// compilers do not vectorize float comparisons that might trap.
using Float4 = float __attribute__((vector_size(16)));
using Int4 = int32_t __attribute__((vector_size(16)));

inline Float4 Splat(float x) { return Float4{x, x, x, x}; }

inline Float4 LoadFloat4(const float* p) {
  Float4 x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

// Returns exp(x) for x <= 0, with a relative error below 2e-7; 0 below -87.
inline Float4 ExpNegative(Float4 x) {
  const Float4 low = Splat(-87.f);
  const Float4 round = Splat(12582912.f);
  const Float4 clipped = x > low ? x : low;
  const Float4 n = (clipped * Splat(1.44269504f) + round) - round;  // x / ln 2
  // ln 2 in two parts. The high part has few bits, so that n times it is exact.
  const Float4 r = (clipped - n * Splat(0.693359375f)) - n * Splat(-2.12194440e-4f);
  Float4 p = Splat(1.f / 5040);  // Taylor, |r| <= ln 2 / 2
  for (const float coefficient : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) {
    p = p * r + Splat(coefficient);
  }
  const Int4 bits = (__builtin_convertvector(n, Int4) + 127) << 23;
  Float4 scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  return x > low ? p * scale : Splat(0.f);
}

inline float ExpNegative(float x) { return ExpNegative(Splat(x))[0]; }

struct RowMax {
  float value = kMasked;
  bool valid = true;  // neither NaN nor +inf
};

inline RowMax MaxLogit(const float* logits, int n) {
  constexpr int kVectors = kRowLanes / 4;
  constexpr float kHighest = std::numeric_limits<float>::max();
  std::array<Float4, kVectors> lanes;
  std::array<Int4, kVectors> bad{};
  lanes.fill(Splat(kMasked));
  int i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) {
    for (size_t j = 0; j < kVectors; ++j) {
      const Float4 x = LoadFloat4(logits + i + 4 * j);
      lanes[j] = x > lanes[j] ? x : lanes[j];
      bad[j] |= ~(x <= Splat(kHighest));
    }
  }
  RowMax max;
  for (size_t j = 0; j < kVectors; ++j) {
    for (int k = 0; k < 4; ++k) {
      max.value = lanes[j][k] > max.value ? lanes[j][k] : max.value;
      max.valid = max.valid && bad[j][k] == 0;
    }
  }
  for (; i < n; ++i) {
    max.value = logits[i] > max.value ? logits[i] : max.value;
    max.valid = max.valid && logits[i] <= kHighest;
  }
  return max;
}

// Returns the first index of `value`. REQUIRES: `value` is among the logits.
inline int32_t FirstOf(const float* logits, int n, float value) {
  constexpr int kChunk = 64;
  int32_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    Int4 found{};
    for (int j = 0; j < kChunk; j += 4) {
      found |= LoadFloat4(logits + i + j) == Splat(value);
    }
    if ((found[0] | found[1] | found[2] | found[3]) != 0) {
      break;
    }
  }
  while (logits[i] != value) {
    ++i;
  }
  return i;
}

}  // namespace turbomind
