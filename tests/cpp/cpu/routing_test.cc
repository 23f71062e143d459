#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"

using namespace turbomind;

namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed Route(Device& device, const std::vector<float>& logits, int num_experts, int top_k,
             bool normalize) {
  const int tokens = static_cast<int>(logits.size()) / num_experts;
  const auto size = static_cast<size_t>(tokens * top_k);
  Routed routed{std::vector<int32_t>(size, -1), std::vector<float>(size, -1.f)};
  device.RouteExperts({.logits = logits.data(),
                       .ids = routed.ids.data(),
                       .weights = routed.weights.data(),
                       .num_tokens = tokens,
                       .num_experts = num_experts,
                       .top_k = top_k,
                       .normalize = normalize});
  return routed;
}

}  // namespace

TEST_CASE("the router selects the highest experts in order of ids, with ties to the lower id") {
  const auto device = MakeCpuDevice(1);
  const std::vector<float> logits = {1.f, 3.f, 3.f, 2.f, 3.f};
  Routed routed = Route(*device, logits, 5, 2, true);
  CHECK(routed.ids == std::vector<int32_t>{1, 2});
  CHECK(routed.weights == std::vector<float>{0.5f, 0.5f});
  routed = Route(*device, logits, 5, 4, false);
  CHECK(routed.ids == std::vector<int32_t>{1, 2, 3, 4});
  const double sum = std::exp(-2) + std::exp(-1) + 3;
  CHECK(routed.weights[0] == doctest::Approx(1 / sum));
  CHECK(routed.weights[2] == doctest::Approx(std::exp(-1) / sum));
  const Routed all_equal = Route(*device, std::vector<float>(7, 0.25f), 7, 3, true);
  CHECK(all_equal.ids == std::vector<int32_t>{0, 1, 2});
}

TEST_CASE("NaN and infinite logits still select valid experts") {
  const auto device = MakeCpuDevice(1);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> cases = {
      {NAN, NAN, NAN, NAN},     {NAN, 1.f, NAN, 2.f},    {-kInf, -kInf, -kInf, -kInf},
      {kInf, 1.f, 2.f, kInf},   {kInf, NAN, -kInf, 0.f}, {-kInf, NAN, -kInf, NAN},
      {3e38f, -3e38f, 0.f, 1.f}};
  for (const std::vector<float>& logits : cases) {
    for (int top_k = 1; top_k <= 4; ++top_k) {
      for (const bool normalize : {false, true}) {
        const Routed routed = Route(*device, logits, 4, top_k, normalize);
        for (size_t j = 0; j < routed.ids.size(); ++j) {
          CHECK(routed.ids[j] >= 0);
          CHECK(routed.ids[j] < 4);
          CHECK((j == 0 || routed.ids[j] > routed.ids[j - 1]));
        }
      }
    }
  }
  CHECK(Route(*device, cases[1], 4, 2, true).ids == std::vector<int32_t>{1, 3});
  CHECK(Route(*device, cases[6], 4, 1, true).weights == std::vector<float>{1.f});
}

TEST_CASE("a bias selects experts by sigmoid or softmax scores and leaves the weights unchanged") {
  const auto device = MakeCpuDevice(1);
  const std::vector<float> logits = {0.f, 2.f, -1.f, 1.f};
  const std::vector<float> bias = {0.f, -5.f, 0.5f, 0.f};  // never expert 1
  for (const bool sigmoid : {true, false}) {
    for (const bool normalize : {true, false}) {
      std::vector<int32_t> ids(2, -1);
      std::vector<float> weights(2, -1.f);
      device->RouteExperts({.logits = logits.data(),
                            .ids = ids.data(),
                            .weights = weights.data(),
                            .num_tokens = 1,
                            .num_experts = 4,
                            .top_k = 2,
                            .normalize = normalize,
                            .sigmoid = sigmoid,
                            .bias = bias.data()});
      CHECK(ids == std::vector<int32_t>{2, 3});
      const double all = std::exp(0) + std::exp(2) + std::exp(-1) + std::exp(1);
      const double second = sigmoid ? 1 / (1 + std::exp(1)) : std::exp(-1) / all;
      const double third = sigmoid ? 1 / (1 + std::exp(-1)) : std::exp(1) / all;
      const double sum = normalize ? second + third : 1;
      CHECK(weights[0] == doctest::Approx(second / sum));
      CHECK(weights[1] == doctest::Approx(third / sum));
    }
  }
}

TEST_CASE("experts come from the groups whose two best scores have the largest sum") {
  const auto device = MakeCpuDevice(1);
  // Groups of three. The best expert is in group 0, whose second one is low; 1 and 3 are best.
  const std::vector<float> logits = {3.f, -4.f, -4.f, 1.f,  2.f, -3.f,
                                     0.f, 0.f,  0.f,  -2.f, 1.f, 1.5f};
  const std::vector<float> zeros(12, 0.f);
  for (const bool sigmoid : {true, false}) {
    for (const bool normalize : {true, false}) {
      for (const float* bias : {static_cast<const float*>(nullptr), zeros.data()}) {
        std::vector<int32_t> ids(3, -1);
        std::vector<float> weights(3, -1.f);
        device->RouteExperts({.logits = logits.data(),
                              .ids = ids.data(),
                              .weights = weights.data(),
                              .num_tokens = 1,
                              .num_experts = 12,
                              .top_k = 3,
                              .normalize = normalize,
                              .sigmoid = sigmoid,
                              .bias = bias,
                              .num_groups = 4,
                              .top_groups = 2});
        // By a softmax, the sum of two is largest in groups 0 and 1: e^3 + e^-4 and e^2 + e.
        CHECK(ids == (sigmoid ? std::vector<int32_t>{3, 4, 11} : std::vector<int32_t>{0, 3, 4}));
        double all = 0;
        for (const float logit : logits) {
          all += std::exp(logit);
        }
        double sum = 0;
        std::vector<double> scores;
        for (const int32_t id : ids) {
          const float logit = logits[static_cast<size_t>(id)];
          scores.push_back(sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit) / all);
          sum += scores.back();
        }
        for (size_t j = 0; j < 3; ++j) {
          CHECK(weights[j] == doctest::Approx(scores[j] / (normalize ? sum : 1)));
        }
      }
    }
  }
}

TEST_CASE("NaN and infinite logits still select valid experts by scores") {
  const auto device = MakeCpuDevice(1);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> bias = {0.f, 0.1f, NAN, kInf};
  for (const float a : {NAN, kInf, -kInf, 1.f}) {
    const std::vector<float> logits = {a, NAN, -kInf, 1.f};
    for (const int kind : {0, 1, 2, 3}) {
      std::vector<int32_t> ids(3, -1);
      std::vector<float> weights(3);
      device->RouteExperts({.logits = logits.data(),
                            .ids = ids.data(),
                            .weights = weights.data(),
                            .num_tokens = 1,
                            .num_experts = 4,
                            .top_k = 3,
                            .normalize = true,
                            .sigmoid = kind % 2 == 1,
                            .bias = bias.data(),
                            .num_groups = kind < 2 ? 1 : 2,
                            .top_groups = kind < 2 ? 1 : 2});
      for (size_t j = 0; j < ids.size(); ++j) {
        CHECK(ids[j] >= 0);
        CHECK(ids[j] < 4);
        CHECK((j == 0 || ids[j] > ids[j - 1]));
      }
    }
  }
}
