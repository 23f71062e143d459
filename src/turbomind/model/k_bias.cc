#include "turbomind/model/k_bias.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

namespace turbomind {
namespace {

// Returns the mean of n turns by 0, theta, 2 theta, ... as a factor of the turn to their middle.
double MeanOfTurns(double theta, int n) {
  const double turn = std::sin(theta / 2);
  return turn == 0. ? 1. : std::sin(n * theta / 2) / (n * turn);
}

// Returns the amplitude of a pair that a K offset leaves, if the pair has `size`.
double LeftByOffset(double size, double theta, int block_seq_len) {
  const double share = MeanOfTurns(theta, block_seq_len);
  return size * std::sqrt(std::max(0., 1. - share * share));
}

// The amplitudes that a K offset leaves of one head's bias, by pair.
std::vector<double> LeftByPair(const float* bias, const RopeTable& rope, int block_seq_len) {
  const size_t half = rope.inv_freq().size();
  std::vector<double> left(half);
  for (size_t i = 0; i < half; ++i) {
    left[i] = LeftByOffset(std::hypot(bias[i], bias[half + i]), rope.inv_freq()[i], block_seq_len);
  }
  return left;
}

// Returns the fast pairs of one head, those with the most bias first.
std::vector<int32_t> FindFastPairs(const float* bias, const RopeTable& rope, int block_seq_len) {
  const std::vector<double> left = LeftByPair(bias, rope, block_seq_len);
  std::vector<int32_t> pairs(left.size());
  std::iota(pairs.begin(), pairs.end(), 0);
  const auto left_of = [&](int32_t pair) { return left[static_cast<size_t>(pair)]; };
  std::erase_if(pairs, [&](int32_t pair) { return left_of(pair) <= kMinFastBias; });
  std::stable_sort(pairs.begin(), pairs.end(),
                   [&](int32_t a, int32_t b) { return left_of(a) > left_of(b); });
  pairs.resize(std::min(pairs.size(), size_t{kMaxFastPairs}));
  return pairs;
}

}  // namespace

std::vector<float> MakeKBase(std::vector<float> bias, int head_dim, const RopeTable* rope,
                             int block_seq_len) {
  if (rope == nullptr || !rope->enabled()) {
    return bias;
  }
  const auto half = static_cast<size_t>(rope->dim() / 2);
  for (size_t head = 0; head < bias.size(); head += static_cast<size_t>(head_dim)) {
    for (size_t i = 0; i < half; ++i) {
      const double theta = rope->inv_freq()[i];
      const double share = MeanOfTurns(theta, block_seq_len);
      // The middle of the positions lies half a position before s + block_seq_len / 2.
      const double cos = share * std::cos(theta / 2);
      const double sin = -share * std::sin(theta / 2);
      float& low = bias[head + i];
      float& high = bias[head + half + i];
      const double a = low;
      const double b = high;
      low = static_cast<float>(a * cos - b * sin);
      high = static_cast<float>(b * cos + a * sin);
    }
  }
  return bias;
}

FastPairs TakeFastPairs(std::vector<float>* bias, int head_dim, const RopeTable& rope,
                        int block_seq_len) {
  const auto dim = static_cast<size_t>(head_dim);
  const size_t half = rope.inv_freq().size();
  std::vector<std::vector<int32_t>> of_heads;
  size_t most = 0;
  int32_t repeated = 0;
  for (size_t head = 0; head < bias->size(); head += dim) {
    of_heads.push_back(FindFastPairs(bias->data() + head, rope, block_seq_len));
    if (of_heads.back().size() > most) {
      most = of_heads.back().size();
      repeated = of_heads.back().front();
    }
  }
  FastPairs fast;
  fast.num_pairs = static_cast<int>(most);
  fast.directions.resize(of_heads.size() * most * 2 * dim);
  float* u = fast.directions.data();
  float* channels = bias->data();
  for (std::vector<int32_t>& pairs : of_heads) {
    const size_t found = pairs.size();
    pairs.resize(most, repeated);  // the directions of those stay zero
    for (size_t i = 0; i < most; ++i, u += 2 * dim) {
      if (i < found) {
        const auto low = static_cast<size_t>(pairs[i]);
        const size_t high = low + half;
        float* w = u + dim;
        u[low] = w[high] = std::exchange(channels[low], 0.f);
        u[high] = std::exchange(channels[high], 0.f);
        w[low] = -u[high];
      }
    }
    fast.pairs.insert(fast.pairs.end(), pairs.begin(), pairs.end());
    channels += dim;
  }
  return fast;
}

std::vector<float> MakeWaves(const std::vector<int32_t>& pairs, const RopeTable& rope,
                             int64_t num_positions) {
  std::vector<float> waves(pairs.size() * 2 * static_cast<size_t>(num_positions));
  float* cos = waves.data();
  for (const int32_t pair : pairs) {
    rope.FillWave(pair, num_positions, cos, cos + num_positions);
    cos += 2 * num_positions;
  }
  return waves;
}

std::vector<float> ReadKBias(const ModelConfig& model, const LayerWeights& layer,
                             DeviceMemory& device) {
  std::vector<float> bias(static_cast<size_t>(model.num_kv_heads) * model.head_dim, 0.f);
  if (!layer.qkv.bias.empty() && layer.k_norm.empty()) {
    device.Copy(bias.data(), layer.qkv.bias.data + int64_t{model.num_heads} * model.head_dim,
                bias.size() * sizeof(float));
    device.Synchronize();
  }
  return bias;
}

float KBiasLeft(const ModelConfig& model, const Weights& weights, DeviceMemory& device,
                int block_seq_len) {
  double left = 0.;
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const int index = model.RopeOf(static_cast<int>(i));
    if (index < 0) {
      continue;  // the offset is the bias
    }
    const RopeTable rope(model.ropes[static_cast<size_t>(index)]);
    std::vector<float> bias = ReadKBias(model, weights.layers[i], device);
    TakeFastPairs(&bias, model.head_dim, rope, block_seq_len);
    for (size_t head = 0; head < bias.size(); head += static_cast<size_t>(model.head_dim)) {
      for (const double pair : LeftByPair(bias.data() + head, rope, block_seq_len)) {
        left = std::max(left, pair);
      }
    }
  }
  return static_cast<float>(left);
}

}  // namespace turbomind
