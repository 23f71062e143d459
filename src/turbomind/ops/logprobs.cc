// ⑧ Computes the log-probabilities of one row of logits.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "turbomind/core/check.h"
#include "turbomind/ops/row_math.h"
#include "turbomind/ops/sampling.h"

namespace turbomind {

TokenLogprobs ComputeLogprobs(const float* logits, int vocab_size, int32_t token, int num_top) {
  Check(token >= 0 && token < vocab_size,
        "the token of a log-probability must be in the vocabulary");
  TokenLogprobs result;
  const RowMax max = MaxLogit(logits, vocab_size);
  if (!max.valid || max.value == kMasked) {
    result.chosen = std::numeric_limits<float>::quiet_NaN();
    return result;
  }
  double total = 0;
  for (int begin = 0; begin < vocab_size; begin += 4096) {
    std::array<Float4, kRowLanes / 4> lanes{};  // short sums in FP32, then in double
    const int end = std::min(vocab_size, begin + 4096);
    int i = begin;
    for (; i + kRowLanes <= end; i += kRowLanes) {
      for (size_t j = 0; j < lanes.size(); ++j) {
        lanes[j] += ExpNegative(LoadFloat4(logits + i + 4 * j) - Splat(max.value));
      }
    }
    for (; i < end; ++i) {
      lanes[0][0] += ExpNegative(logits[i] - max.value);
    }
    for (const Float4& lane : lanes) {
      for (int k = 0; k < 4; ++k) {
        total += lane[k];
      }
    }
  }
  const double log_total = std::log(total);
  const auto logprob = [&](int32_t id) {
    return static_cast<float>(static_cast<double>(logits[id]) - max.value - log_total);
  };
  result.chosen = logprob(token);
  // A heap of the best so far, with the worst on top. Ties go to the lower id.
  const auto better = [](const std::pair<int32_t, float>& a, const std::pair<int32_t, float>& b) {
    return a.second > b.second || (a.second == b.second && a.first < b.first);
  };
  auto& top = result.top;
  const auto wanted = static_cast<size_t>(std::clamp(num_top, 0, vocab_size));
  for (int32_t i = 0; wanted > 0 && i < vocab_size; ++i) {
    if (top.size() == wanted && !(logits[i] > top.front().second)) {
      continue;
    }
    if (top.size() == wanted) {
      std::pop_heap(top.begin(), top.end(), better);
      top.pop_back();
    }
    top.emplace_back(i, logits[i]);
    std::push_heap(top.begin(), top.end(), better);
  }
  std::sort_heap(top.begin(), top.end(), better);
  for (auto& [id, value] : top) {
    value = logprob(id);
  }
  return result;
}

}  // namespace turbomind
