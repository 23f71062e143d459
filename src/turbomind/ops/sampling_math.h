#pragma once

// ⑧ Defines how a token is sampled from a row of logits. The sampler and the devices share this
// header so that they sample the same token. Every number has the same bits in both, because the
// same operations run in the same order without contraction. A .cu file that includes this header
// is compiled with -fmad=false.
//
//   weight  WeightOf((logit - highest) * inverse_temperature), FP32
//   sums    FP64. The sum over the whole row adds runs of kSumBlock weights, each in SumOfBlock's
//           order, in order of the ids. The sum over candidates follows the order of candidates.
//
// Without top_k and with top_p >= 1, weights below min_p count as 0. The token is the first one at
// which the sum from id 0 exceeds `uniform` times the total.
//
// Otherwise the candidates are sorted by decreasing weight; among equals the lower id is first. The
// filters apply in this order: the first top_k; then the fewest that reach top_p of the sum, at
// least one; then those of at least min_p. The sum is over the top_k, or over all weights without
// top_k. The token is the first candidate at which the running sum exceeds `uniform` times the sum
// of the remaining candidates.

#include <cstdint>

#include "turbomind/core/float_convert.h"
#include "turbomind/ops/params.h"

namespace turbomind {

inline constexpr int kSumBlock = 512;
inline constexpr int kSumLanes = 8;

// Returns exp(x) for x <= 0, with a relative error below 2e-7; 0 below -87. Bit-equal to
// ExpNegative in row_math.h.
TM_HD float WeightOf(float x) {
  constexpr float kLow = -87.f;
  constexpr float kRound = 12582912.f;
  const float clipped = x > kLow ? x : kLow;
  const float n = (clipped * 1.44269504f + kRound) - kRound;  // x / ln 2
  // ln 2 in two parts. The high part has few bits, so that n times it is exact.
  const float r = (clipped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.f / 5040;  // Taylor, |r| <= ln 2 / 2
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const auto exponent = static_cast<uint32_t>(static_cast<int32_t>(n) + 127);
  return x > kLow ? p * BitsFloat(exponent << 23) : 0.f;
}

// Returns whether every token may be sampled, apart from min_p.
TM_HD bool SamplesFromAll(const RowSampling& sampling, int vocab_size) {
  return (sampling.top_k <= 0 || sampling.top_k >= vocab_size) && sampling.top_p >= 1.f;
}
// Returns whether top_k removes any token.
TM_HD bool LimitsCount(const RowSampling& sampling, int vocab_size) {
  return sampling.top_k > 0 && sampling.top_k < vocab_size;
}

// Returns the sum of weight(i) over at most kSumBlock weights. Lane i % kSumLanes sums in order.
// The rest after the last whole round is added first, then lane by lane.
template <class Lane, class Weight>
TM_HD double SumOfBlock(int size, const Lane& lane_sum, const Weight& weight) {
  double sum = 0;
  for (int i = size / kSumLanes * kSumLanes; i < size; ++i) {
    sum += weight(i);
  }
  for (int lane = 0; lane < kSumLanes; ++lane) {
    sum += lane_sum(lane);
  }
  return sum;
}

// The number of candidates that remain after filtering, and their sum.
struct Kept {
  int count = 0;
  double sum = 0;
};

// Applies top_p and min_p to `count` candidates sorted by decreasing weight. top_p is a share of
// `total`.
template <class Weight>
TM_HD Kept KeepByMass(int count, double total, const RowSampling& sampling, const Weight& weight) {
  const double wanted = sampling.top_p * total;
  Kept kept;
  while (kept.count < count && (kept.count == 0 || kept.sum < wanted) &&
         weight(kept.count) >= sampling.min_p) {
    kept.sum += weight(kept.count);
    ++kept.count;
  }
  return kept;
}

// Returns the index of the sampled candidate. If rounding skips past all of them, returns the last
// one.
template <class Weight>
TM_HD int SampleKept(const Kept& kept, double uniform, const Weight& weight) {
  double left = uniform * kept.sum;
  int i = 0;
  while (i + 1 < kept.count && left >= weight(i)) {
    left -= weight(i);
    ++i;
  }
  return i;
}

}  // namespace turbomind
