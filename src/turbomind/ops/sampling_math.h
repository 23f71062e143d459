#pragma once

// ⑧ How a token is sampled from a row of logits: what the sampler and devices that sample share, so
// that they choose the same token. Every number has the same bits on both, since each is computed
// by the same operations in the same order, none contracted (a .cu with it is compiled with
// -fmad=false):
//
//   weight  WeightOf((logit - highest) * inverse_temperature), FP32
//   sums    FP64. Of many weights: of runs of kSumBlock, by SumOfBlock's order, then of these in
//           order of the ids. Of candidates: in their order
//
// Without top_k, and top_p >= 1: weights below min_p count as 0; the token is the first at which
// the sum from id 0 on exceeds `uniform` of the whole.
//
// Else candidates by decreasing weight, the lower id first among equals. Those that stay: the first
// top_k; of these the fewest that reach top_p of the sum (of the top_k; without top_k of all
// weights), at least one; of these the ones of at least min_p. The token is the first of them at
// which their sum exceeds `uniform` of that of all that stay.

#include <cstdint>

#include "turbomind/core/float_convert.h"
#include "turbomind/ops/params.h"

namespace turbomind {

inline constexpr int kSumBlock = 512;
inline constexpr int kSumLanes = 8;

// exp(x) for x <= 0; relative error below 2e-7. Below -87 it is 0. Bit for bit row_math.h's.
TM_HD float WeightOf(float x) {
  constexpr float kLow = -87.f;
  constexpr float kRound = 12582912.f;
  const float clipped = x > kLow ? x : kLow;
  const float n = (clipped * 1.44269504f + kRound) - kRound;  // x / ln 2
  // ln 2 in two parts, the high one of few bits, so that n times it is exact.
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

// Whether every token may be sampled, min_p aside.
TM_HD bool SamplesFromAll(const RowSampling& sampling, int vocab_size) {
  return (sampling.top_k <= 0 || sampling.top_k >= vocab_size) && sampling.top_p >= 1.f;
}
// Whether top_k leaves less than all.
TM_HD bool LimitsCount(const RowSampling& sampling, int vocab_size) {
  return sampling.top_k > 0 && sampling.top_k < vocab_size;
}

// weight(i), of at most kSumBlock: lanes i % kSumLanes, each in order; what is left behind the last
// whole round comes first, then lane by lane.
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

// The first candidates that stay, and their sum.
struct Kept {
  int count = 0;
  double sum = 0;
};

// weight(i) of candidate i of `count` by decreasing weight; `total` is what top_p is a share of.
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

// The index of the candidate that is sampled; the last where rounding took the last step.
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
