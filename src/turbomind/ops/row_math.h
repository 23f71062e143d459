#pragma once

// ⑧ Arithmetic over one row of logits, shared by sampling and log-probabilities.

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace turbomind {

inline constexpr float kMasked = -std::numeric_limits<float>::infinity();
inline constexpr int kRowLanes = 16;

// exp(x) for x <= 0, branch-free so that loops over the vocabulary vectorise; relative error below
// 2e-7. Below -87 it is 0.
inline float ExpNegative(float x) {
  constexpr float kLog2e = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // few bits: n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.f;
  const float clipped = x > -87.f ? x : -87.f;
  const float shifted = clipped * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = (clipped - n * kLn2High) - n * kLn2Low;
  float p = 1.f / 5040;  // Taylor, |r| <= ln 2 / 2
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  return x > -87.f ? p * scale : 0.f;
}

struct RowMax {
  float value = kMasked;
  bool valid = true;  // neither NaN nor +inf
};

// One vector pass.
inline RowMax MaxLogit(const float* logits, int n) {
  std::array<float, kRowLanes> lanes;
  std::array<int32_t, kRowLanes> bad{};
  lanes.fill(kMasked);
  constexpr float kHighest = std::numeric_limits<float>::max();
  int i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) {
    for (int j = 0; j < kRowLanes; ++j) {
      const float x = logits[i + j];
      const auto lane = static_cast<size_t>(j);
      lanes[lane] = x > lanes[lane] ? x : lanes[lane];
      bad[lane] |= x <= kHighest ? 0 : 1;
    }
  }
  RowMax max;
  for (size_t j = 0; j < kRowLanes; ++j) {
    max.value = lanes[j] > max.value ? lanes[j] : max.value;
    max.valid = max.valid && bad[j] == 0;
  }
  for (; i < n; ++i) {
    max.value = logits[i] > max.value ? logits[i] : max.value;
    max.valid = max.valid && logits[i] <= kHighest;
  }
  return max;
}

}  // namespace turbomind
