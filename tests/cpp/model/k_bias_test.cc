#include "turbomind/model/k_bias.h"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "turbomind/ops/rope.h"

namespace turbomind {
namespace {

constexpr int kDim = 64;

RopeTable Rope(double theta, int dim = kDim) {
  RopeConfig config;
  config.kind = RopeKind::kDefault;
  config.theta = static_cast<float>(theta);
  config.dim = dim;
  return RopeTable(config);
}

// Returns RoPE of x at a position.
std::vector<double> Turned(const RopeTable& rope, const std::vector<float>& x, int position) {
  const auto half = static_cast<size_t>(rope.dim() / 2);
  std::vector<float> cos(half);
  std::vector<float> sin(half);
  rope.Fill(&position, nullptr, 1, cos.data(), sin.data());
  std::vector<double> y(x.begin(), x.end());
  for (size_t i = 0; i < half; ++i) {
    const double a = x[i];
    const double b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[i] + a * sin[i];
  }
  return y;
}

TEST_CASE("k_base after RoPE at the middle of a block is the mean of the bias over its positions") {
  for (const int dim : {kDim, 32}) {
    const RopeTable rope = Rope(10000., dim);
    std::vector<float> bias(2 * kDim);
    for (size_t i = 0; i < bias.size(); ++i) {
      bias[i] = static_cast<float>(i % 7) * 40.f - 100.f;
    }
    for (const int length : {16, 64, 128}) {
      const std::vector<float> base = MakeKBase(bias, kDim, &rope, length);
      for (const int block : {0, 3}) {
        for (size_t head : {0, 1}) {
          const auto of_head = [&](const std::vector<float>& x) {
            return std::vector<float>(x.begin() + static_cast<int64_t>(head) * kDim,
                                      x.begin() + static_cast<int64_t>(head + 1) * kDim);
          };
          std::vector<double> mean(kDim, 0.);
          for (int slot = 0; slot < length; ++slot) {
            const std::vector<double> y = Turned(rope, of_head(bias), block * length + slot);
            for (size_t d = 0; d < mean.size(); ++d) {
              mean[d] += y[d] / length;
            }
          }
          const std::vector<double> got = Turned(rope, of_head(base), block * length + length / 2);
          for (size_t d = 0; d < mean.size(); ++d) {
            CHECK(got[d] == doctest::Approx(mean[d]).epsilon(1e-3));
          }
        }
      }
    }
  }
}

TEST_CASE("fast pairs and the rest of the bias add up to RoPE of the bias at every position") {
  for (const int dim : {kDim, 32}) {
    const RopeTable rope = Rope(1e6, dim);
    const auto half = static_cast<size_t>(dim / 2);
    std::vector<float> bias(2 * kDim, 0.25f);
    bias[0] = 300.f;  // the fastest pair of the first head
    bias[half + 2] = -20.f;
    bias[kDim + 1] = 7.f;  // of the second one
    std::vector<float> rest = bias;
    const FastPairs fast = TakeFastPairs(&rest, kDim, rope, 64);
    CHECK(fast.num_pairs == 2);
    CHECK(fast.pairs == std::vector<int32_t>{0, 2, 1, 0});  // the last one has no bias
    CHECK(rest[0] == 0.f);
    CHECK(rest[half - 1] == 0.25f);
    const std::vector<float> waves = MakeWaves(fast.pairs, rope, 128);
    for (size_t head : {0, 1}) {
      const auto of_head = [&](const std::vector<float>& x) {
        return std::vector<float>(x.begin() + static_cast<int64_t>(head) * kDim,
                                  x.begin() + static_cast<int64_t>(head + 1) * kDim);
      };
      for (const int position : {0, 1, 77, 127}) {
        const std::vector<double> want = Turned(rope, of_head(bias), position);
        std::vector<double> got = Turned(rope, of_head(rest), position);
        for (size_t wave = 4 * head; wave < 4 * head + 4; ++wave) {
          for (size_t d = 0; d < kDim; ++d) {
            got[d] += fast.directions[wave * kDim + d] *
                      waves[wave * 128 + static_cast<size_t>(position)];
          }
        }
        for (size_t d = 0; d < kDim; ++d) {
          CHECK(got[d] == doctest::Approx(want[d]).epsilon(1e-5));
        }
      }
    }
  }
}

TEST_CASE("a head has at most kMaxFastPairs fast pairs, those with the most bias") {
  const RopeTable rope = Rope(10.);  // turns fast in all pairs
  std::vector<float> bias(kDim);
  for (int i = 0; i < kDim / 2; ++i) {
    bias[static_cast<size_t>(i)] = 10.f + static_cast<float>(i);
  }
  const FastPairs fast = TakeFastPairs(&bias, kDim, rope, 64);
  CHECK(fast.num_pairs == kMaxFastPairs);
  CHECK(fast.pairs.front() == kDim / 2 - 1);
  CHECK(bias[kDim / 2 - 1] == 0.f);
  CHECK(bias[0] == 10.f);
}

TEST_CASE("k_base of a layer without RoPE is the bias") {
  const std::vector<float> bias(kDim, 3.f);
  CHECK(MakeKBase(bias, kDim, nullptr, 64) == bias);
}

}  // namespace
}  // namespace turbomind
