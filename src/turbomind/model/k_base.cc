#include "turbomind/model/k_base.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace turbomind {
namespace {

// Returns the mean of n turns by 0, theta, 2 theta, ... as a factor of the turn to their middle.
double MeanOfTurns(double theta, int n) {
  const double turn = std::sin(theta / 2);
  return turn == 0. ? 1. : std::sin(n * theta / 2) / (n * turn);
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
    const std::vector<float> bias = ReadKBias(model, weights.layers[i], device);
    const auto half = static_cast<size_t>(rope.enabled() ? rope.dim() / 2 : 0);
    for (size_t head = 0; head < bias.size(); head += static_cast<size_t>(model.head_dim)) {
      for (size_t pair = 0; pair < half; ++pair) {
        const double share = MeanOfTurns(rope.inv_freq()[pair], block_seq_len);
        const double size = std::hypot(bias[head + pair], bias[head + half + pair]);
        left = std::max(left, size * std::sqrt(std::max(0., 1. - share * share)));
      }
    }
  }
  return static_cast<float>(left);
}

}  // namespace turbomind
