#include "turbomind/model/k_base.h"

#include <cmath>
#include <cstddef>

namespace turbomind {

std::vector<float> MakeKBase(std::vector<float> bias, int head_dim, const RopeTable* rope,
                             int block_seq_len) {
  if (rope == nullptr || !rope->enabled()) {
    return bias;
  }
  const auto half = static_cast<size_t>(rope->dim() / 2);
  for (size_t head = 0; head < bias.size(); head += static_cast<size_t>(head_dim)) {
    for (size_t i = 0; i < half; ++i) {
      const double theta = rope->inv_freq()[i];
      const double turn = std::sin(theta / 2);
      const double share =
          turn == 0. ? 1. : std::sin(block_seq_len * theta / 2) / (block_seq_len * turn);
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

}  // namespace turbomind
