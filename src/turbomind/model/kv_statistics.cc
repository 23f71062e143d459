#include "turbomind/model/kv_statistics.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int kFirstExponent = 127 - 20;

void AddRow(const float* row, int head_dim, size_t head, KvStatistics::Side* side) {
  float& amax = side->amax[head];
  int64_t* histogram = side->histogram.data() + head * KvStatistics::kBins;
  for (int d = 0; d < head_dim; ++d) {
    const float magnitude = std::fabs(row[d]);
    if (std::isfinite(magnitude)) {
      amax = std::max(amax, magnitude);
    }
    ++histogram[KvStatistics::Bin(magnitude)];
  }
}

}  // namespace

int KvStatistics::Bin(float x) {
  const auto bits = static_cast<int32_t>(std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu);
  return std::clamp((bits >> 19) - (kFirstExponent << 4), 0, kBins - 1);
}

KvStatistics::KvStatistics(int num_layers, int kv_heads, int head_dim)
    : num_layers_(num_layers), kv_heads_(kv_heads), head_dim_(head_dim) {
  Check(num_layers > 0 && kv_heads > 0 && head_dim > 0,
        "num_layers, kv_heads and head_dim must be positive");
  const size_t heads = static_cast<size_t>(num_layers) * static_cast<size_t>(kv_heads);
  k_sum_.assign(heads * static_cast<size_t>(head_dim), 0.);
  k_square_sum_ = k_sum_;
  for (Side& side : sides_) {
    side.amax.assign(heads, 0.f);
    side.histogram.assign(heads * kBins, 0);
  }
}

void KvStatistics::Add(int layer, const Rows& rows) {
  Check(layer >= 0 && layer < num_layers_, "the layer must exist");
  num_tokens_ += layer == 0 ? rows.num_tokens : 0;
  for (int head = 0; head < kv_heads_; ++head) {
    const size_t index =
        static_cast<size_t>(layer) * static_cast<size_t>(kv_heads_) + static_cast<size_t>(head);
    double* sum = k_sum_.data() + index * static_cast<size_t>(head_dim_);
    double* square_sum = k_square_sum_.data() + index * static_cast<size_t>(head_dim_);
    for (int token = 0; token < rows.num_tokens; ++token) {
      const int64_t offset = token * rows.stride + static_cast<int64_t>(head) * head_dim_;
      for (int d = 0; d < head_dim_; ++d) {
        const double value = rows.k[offset + d];
        if (std::isfinite(value)) {
          sum[d] += value;
          square_sum[d] += value * value;
        }
      }
      AddRow(rows.k + offset, head_dim_, index, &sides_[0]);
      AddRow(rows.v + offset, head_dim_, index, &sides_[1]);
    }
  }
}

}  // namespace turbomind
