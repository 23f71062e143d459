#pragma once

// The part of device_suite.h for experts: routing, grouping, and sums of their outputs.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

#include "cpu/linear_fixture.h"
#include "ops/device_fixture.h"

namespace turbomind::testing {

using Ids = std::vector<int32_t>;

// The experts and weights of tokens.
struct Routes {
  Ids ids;
  std::vector<float> weights;
};

inline bool Same(const Routes& a, const Routes& b) {
  return a.ids == b.ids && Same(a.weights, b.weights);
}

// Returns the items with the highest keys in order of ids. NaN ranks as -infinity, and the lower id
// wins a tie.
inline Ids Highest(std::vector<double> keys, int count) {
  std::ranges::replace_if(
      keys, [](double key) { return std::isnan(key); }, -INFINITY);
  Ids ids(keys.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids, std::greater(),
                           [&](int32_t id) { return keys[static_cast<size_t>(id)]; });
  ids.resize(static_cast<size_t>(count));
  std::ranges::sort(ids);
  return ids;
}

// Sets the keys outside the groups with the largest sums of two keys, or the largest keys, to
// -infinity.
inline void HideGroups(const RouteExpertsParams& p, std::vector<double>& keys) {
  const auto size = static_cast<int64_t>(keys.size()) / p.num_groups;
  std::vector<double> sums;
  for (auto group = keys.begin(); group != keys.end(); group += size) {
    std::vector<double> own(group, group + size);
    std::ranges::replace_if(
        own, [](double key) { return std::isnan(key); }, -INFINITY);
    std::ranges::sort(own, std::greater());
    sums.push_back(p.best_of_group ? own[0] : own[0] + own[1]);
  }
  const Ids selected = Highest(sums, p.top_groups);
  for (int group = 0; group < p.num_groups; ++group) {
    if (!std::ranges::binary_search(selected, group)) {
      std::fill_n(keys.begin() + group * size, size, -INFINITY);
    }
  }
}

// Routes a token. `bias` may be empty. Returns the weights.
inline std::vector<Exact> RouteToken(const RouteExpertsParams& p, const float* logits,
                                     const std::vector<float>& bias, double relative, Ids& ids) {
  const auto count = static_cast<size_t>(p.num_experts);
  const bool by_scores = p.sigmoid || !bias.empty() || p.num_groups > 1;
  double highest = -INFINITY;
  for (size_t i = 0; i < count; ++i) {
    highest = std::max(highest, double{logits[i]});  // NaN is skipped
  }
  std::vector<double> scores, keys;
  double all = 0;
  for (size_t i = 0; i < count; ++i) {
    const double logit = logits[i];
    scores.push_back(p.sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit - highest));
    all += scores.back();
  }
  for (size_t i = 0; i < count; ++i) {
    // A softmax that is normalized over the selected experts does not read the others.
    scores[i] /= p.sigmoid || (p.normalize && !by_scores) ? 1 : all;
    keys.push_back(by_scores ? scores[i] + (bias.empty() ? 0.f : bias[i]) : double{logits[i]});
  }
  if (p.num_groups > 1) {
    HideGroups(p, keys);
  }
  ids = Highest(keys, p.top_k);
  double sum = 0;
  for (const int32_t id : ids) {
    sum += scores[static_cast<size_t>(id)];
  }
  std::vector<Exact> weights;
  for (const int32_t id : ids) {
    const double weight = scores[static_cast<size_t>(id)] / (p.normalize ? sum : 1);
    weights.push_back({weight, relative * std::abs(weight)});
  }
  return weights;
}

// Routes on all devices, checks the result and returns the ids.
inline Ids CheckRoutes(const DeviceSuite& suite, RouteExpertsParams p,
                       const std::vector<float>& logits, const std::vector<float>& bias = {},
                       const std::vector<float>& factors = {}) {
  p.num_tokens = static_cast<int>(logits.size()) / p.num_experts;
  CAPTURE(p.num_experts);
  CAPTURE(p.top_k);
  CAPTURE(p.normalize);
  CAPTURE(p.sigmoid);
  CAPTURE(p.num_groups);
  const Routes got = suite.OnAll([&](Device& device) {
    const auto size = static_cast<size_t>(p.num_tokens * p.top_k);
    const DeviceArray<float> from(device, logits);
    const DeviceArray<float> plus(device, bias);
    const DeviceArray<float> times(device, factors);
    const DeviceArray<int32_t> ids(device, Ids(size, -1));
    const DeviceArray<float> weights(device, std::vector<float>(size, 7.f));
    p.logits = from.data();
    p.ids = ids.data();
    p.weights = weights.data();
    p.bias = plus.data();
    p.expert_scale = times.data();
    device.RouteExperts(p);
    return Routes{ids.Read(), weights.Read()};
  });
  Ids ids;
  std::vector<Exact> weights;
  for (size_t at = 0; at < logits.size(); at += static_cast<size_t>(p.num_experts)) {
    Ids own;
    std::ranges::copy(RouteToken(p, logits.data() + at, bias, suite.relative(), own),
                      std::back_inserter(weights));
    for (size_t i = 0; i < own.size() && !factors.empty(); ++i) {
      Exact& weight = *(weights.end() - std::ssize(own) + static_cast<std::ptrdiff_t>(i));
      const double factor = factors[static_cast<size_t>(own[i])];
      weight = {weight.value * factor, weight.error * std::abs(factor) +
                                           suite.relative() * std::abs(weight.value * factor)};
    }
    ids.insert(ids.end(), own.begin(), own.end());
  }
  CHECK(got.ids == ids);
  CheckNear(got.weights, weights);
  return got.ids;
}

TEST_CASE_FIXTURE(DeviceSuite, "routing with ties, NaN and infinities, of any number of experts") {
  const std::vector<float> tied = {1.f, 3.f, 3.f, 2.f, 3.f};
  CHECK(CheckRoutes(*this, {.num_experts = 5, .top_k = 2}, tied) == Ids{1, 2});
  CHECK(CheckRoutes(*this, {.num_experts = 5, .top_k = 4}, tied) == Ids{1, 2, 3, 4});
  CHECK(CheckRoutes(*this, {.num_experts = 4, .top_k = 2}, {kNan, 1.f, kNan, 2.f}) == Ids{1, 3});
  CHECK(CheckRoutes(*this, {.num_experts = 4, .top_k = 1}, {3e38f, -3e38f, 0.f, 1.f}) == Ids{0});
  const float odd[] = {0.f, -0.f, kNan, -kInf, 1.f, 1.f, -1.f, -kNan, kInf};
  for (const int experts : {1, 2, 4, 31, 32, 33, 128, 200}) {
    const auto seed = static_cast<uint32_t>(experts);
    std::vector<float> logits = RandomVector(int64_t{13} * experts, seed);
    std::mt19937 random(seed);
    for (int i = 0; i < 8 * experts; ++i) {  // infinity is in the second half
      logits[static_cast<size_t>(i)] = odd[random() % (i < 4 * experts ? 8 : 9)];
    }
    std::fill_n(logits.begin(), experts, kNan);
    std::fill_n(logits.begin() + experts, experts, -kInf);
    for (const int top_k : {1, 2, 3, 4, 8, 32, 33, experts}) {
      for (const bool normalize : {false, true}) {
        if (top_k <= experts) {
          CheckRoutes(*this, {.num_experts = experts, .top_k = top_k, .normalize = normalize},
                      logits);
        }
      }
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "experts have factors of their weights") {
  const std::vector<float> logits = RandomVector(int64_t{7} * 40, 8);
  const std::vector<float> factors = RandomVector(40, 9);
  for (const bool normalize : {false, true}) {
    for (const bool sigmoid : {false, true}) {
      CheckRoutes(*this,
                  {.num_experts = 40, .top_k = 5, .normalize = normalize, .sigmoid = sigmoid},
                  logits, {}, factors);
    }
  }
}

// Calls fn for both kinds of scores, normalized or not.
template <class F>
void ForScores(RouteExpertsParams p, const F& fn) {
  for (const bool sigmoid : {false, true}) {
    for (const bool normalize : {false, true}) {
      p.sigmoid = sigmoid;
      p.normalize = normalize;
      fn(p);
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite,
                  "routing by scores with a bias, which leaves the weights unchanged") {
  ForScores({.num_experts = 4, .top_k = 2}, [&](const RouteExpertsParams& p) {
    const auto ids = CheckRoutes(*this, p, {0.f, 2.f, -1.f, 1.f}, {0.f, -5.f, 0.5f, 0.f});
    CHECK(ids == Ids{2, 3});
  });
  for (const int experts : {4, 33, 200}) {
    const std::vector<float> logits = RandomVector(9 * experts, static_cast<uint32_t>(experts));
    ForScores({.num_experts = experts, .top_k = 4}, [&](const RouteExpertsParams& p) {
      CheckRoutes(*this, p, logits);
      CheckRoutes(*this, p, logits, RandomVector(experts, 7));
    });
  }
  // Most values are not finite.
  for (const float logit : {kNan, kInf, -kInf, 1.f}) {
    for (const int groups : {1, 2}) {
      ForScores({.num_experts = 4, .top_k = 3, .num_groups = groups, .top_groups = groups},
                [&](const RouteExpertsParams& p) {
                  CheckRoutes(*this, p, {logit, kNan, -kInf, 1.f}, {0.f, 0.1f, kNan, kInf});
                });
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "routing from the groups with the largest sum of two scores") {
  // Groups of three. The best expert is in group 0, whose second one is low. By a softmax the sum
  // of two is largest in groups 0 and 1: e^3 + e^-4 and e^2 + e.
  const std::vector<float> logits = {3.f, -4.f, -4.f, 1.f,  2.f, -3.f,
                                     0.f, 0.f,  0.f,  -2.f, 1.f, 1.5f};
  ForScores({.num_experts = 12, .top_k = 3, .num_groups = 4, .top_groups = 2},
            [&](const RouteExpertsParams& p) {
              const Ids want = p.sigmoid ? Ids{3, 4, 11} : Ids{0, 3, 4};
              CHECK(CheckRoutes(*this, p, logits) == want);
              CHECK(CheckRoutes(*this, p, logits, std::vector<float>(12)) == want);
            });
  // The best experts of a group alone: those of groups 0 and 1 are 3 and 2.
  ForScores(
      {.num_experts = 12, .top_k = 3, .num_groups = 4, .top_groups = 2, .best_of_group = true},
      [&](const RouteExpertsParams& p) {
        CHECK(CheckRoutes(*this, p, logits) == Ids{0, 3, 4});
      });
  constexpr int kShapes[][3] = {{8, 4, 2}, {96, 32, 3}, {256, 8, 4}, {12, 3, 3}};
  for (const auto& [experts, groups, top_groups] : kShapes) {
    std::vector<float> some = RandomVector(9 * experts, static_cast<uint32_t>(experts));
    some[1] = kNan;
    std::fill_n(some.begin() + experts, experts, 0.5f);  // ties of experts and of groups
    for (const bool best : {false, true}) {
      ForScores({.num_experts = experts,
                 .top_k = 4,
                 .num_groups = groups,
                 .top_groups = top_groups,
                 .best_of_group = best},
                [&](const RouteExpertsParams& p) {
                  CheckRoutes(*this, p, some);
                  CheckRoutes(*this, p, some, RandomVector(experts, 7));
                });
    }
  }
}

struct Grouped {
  Ids slots, x_rows, offsets;
  std::vector<float> weights;

  bool operator==(const Grouped&) const = default;
};

inline bool Same(const Grouped& a, const Grouped& b) { return a == b; }

TEST_CASE_FIXTURE(DeviceSuite, "token-expert pairs are sorted by expert, then by token") {
  constexpr int kShapes[][3] = {{1, 1, 1},   {1, 32, 4},   {5, 3, 3},
                                {130, 8, 2}, {4100, 7, 3}, {64, 40, 1}};
  for (const auto& [tokens, experts, top_k] : kShapes) {
    const std::vector<float> keys = RandomVector(int64_t{tokens} * experts, 3);
    Ids ids;
    for (auto own = keys.begin(); own != keys.end(); own += experts) {
      std::ranges::copy(Highest({own, own + experts}, top_k), std::back_inserter(ids));
    }
    const std::vector<float> weights = RandomVector(tokens * top_k, 4);
    Ids pairs(ids.size());
    std::iota(pairs.begin(), pairs.end(), 0);
    std::ranges::stable_sort(pairs, {}, [&](int32_t i) { return ids[static_cast<size_t>(i)]; });
    Grouped want = {Ids(ids.size()), {}, {}, {}};
    for (const int32_t pair : pairs) {
      want.slots[static_cast<size_t>(pair)] = static_cast<int32_t>(want.x_rows.size());
      want.x_rows.push_back(pair / top_k);
      want.weights.push_back(weights[static_cast<size_t>(pair)]);
    }
    for (int expert = 0; expert <= experts; ++expert) {
      want.offsets.push_back(static_cast<int32_t>(
          std::ranges::count_if(ids, [&](int32_t id) { return id < expert; })));
    }
    CAPTURE(tokens);
    for (const auto& given : {weights, {}}) {
      want.weights.resize(given.size());
      CHECK(want == OnAll([&](Device& device) {
              const DeviceArray<int32_t> from(device, ids);
              const DeviceArray<float> by(device, given);
              const DeviceArray<int32_t> slots(device, Ids(ids.size(), -1));
              const DeviceArray<int32_t> x_rows(device, Ids(ids.size(), -1));
              const DeviceArray<int32_t> offsets(device, Ids(want.offsets.size(), -1));
              const DeviceArray<float> slot_weights(device, std::vector(given.size(), kNan));
              device.GroupRows({.ids = from.data(),
                                .slots = slots.data(),
                                .x_rows = x_rows.data(),
                                .offsets = offsets.data(),
                                .num_tokens = tokens,
                                .num_experts = experts,
                                .top_k = top_k,
                                .weights = by.data(),
                                .slot_weights = slot_weights.data()});
              return Grouped{slots.Read(), x_rows.Read(), offsets.Read(), slot_weights.Read()};
            }));
    }
  }
}

// All arrays that routing and grouping write.
struct Assigned {
  Routes routes;
  Grouped rows;

  bool operator==(const Assigned& other) const {
    return Same(routes, other.routes) && rows == other.rows;
  }
};

TEST_CASE_FIXTURE(DeviceSuite, "assigning experts writes what routing and grouping write") {
  for (const auto& [tokens, experts, top_k] :
       {std::array{1, 32, 4}, {7, 4, 4}, {16, 128, 8}, {17, 33, 2}, {300, 8, 2}}) {
    CAPTURE(tokens);
    const std::vector<float> logits = RandomVector(int64_t{tokens} * experts, 9);
    const auto pairs = static_cast<size_t>(tokens * top_k);
    const auto run = [&](Device& device, bool at_once) {
      const DeviceArray<float> from(device, logits);
      const DeviceArray<int32_t> ids(device, Ids(pairs, -1));
      const DeviceArray<float> weights(device, std::vector<float>(pairs, 7.f));
      const DeviceArray<int32_t> slots(device, Ids(pairs, -1));
      const DeviceArray<int32_t> x_rows(device, Ids(pairs, -1));
      const DeviceArray<int32_t> offsets(device, Ids(static_cast<size_t>(experts) + 1, -1));
      const DeviceArray<float> slot_weights(device, std::vector<float>(pairs, 7.f));
      const AssignExpertsParams params = {.route = {.logits = from.data(),
                                                    .ids = ids.data(),
                                                    .weights = weights.data(),
                                                    .num_tokens = tokens,
                                                    .num_experts = experts,
                                                    .top_k = top_k,
                                                    .normalize = true},
                                          .rows = {.ids = ids.data(),
                                                   .slots = slots.data(),
                                                   .x_rows = x_rows.data(),
                                                   .offsets = offsets.data(),
                                                   .num_tokens = tokens,
                                                   .num_experts = experts,
                                                   .top_k = top_k,
                                                   .weights = weights.data(),
                                                   .slot_weights = slot_weights.data()}};
      if (at_once) {
        device.AssignExperts(params);
      } else {
        device.RouteExperts(params.route);
        device.GroupRows(params.rows);
      }
      return Assigned{{ids.Read(), weights.Read()},
                      {slots.Read(), x_rows.Read(), offsets.Read(), slot_weights.Read()}};
    };
    ForAll([&](Device& device) { CHECK(run(device, true) == run(device, false)); });
  }
}

// The rows of experts, whose slots and weights may be empty.
struct ExpertRows {
  std::vector<float> y, before, weights;
  Ids slots;

  std::vector<Exact> Combine(const CombineExpertsParams& p, double relative) const {
    std::vector<Exact> exact;
    for (size_t at = 0; at < before.size(); ++at) {
      const auto dim = static_cast<size_t>(p.dim);
      const auto top_k = static_cast<size_t>(p.top_k);
      double sum = 0;
      for (size_t pair = at / dim * top_k; pair < (at / dim + 1) * top_k; ++pair) {
        const size_t slot = slots.empty() ? pair : static_cast<size_t>(slots[pair]);
        const double given = weights.empty() ? 1 : weights[pair];
        sum += (p.sigmoid ? 1 / (1 + std::exp(-given)) : given) * y[slot * dim + at % dim];
      }
      const double want = (p.accumulate ? before[at] : 0.f) + double{p.scale} * sum;
      // Up to nine terms of about 1, which may cancel.
      exact.push_back({want, relative * (1 + std::abs(want))});
    }
    return exact;
  }

  std::vector<float> Run(Device& device, CombineExpertsParams p) const {
    const DeviceArray<float> from(device, y);
    const DeviceArray<int32_t> of(device, slots);
    const DeviceArray<float> by(device, weights);
    const DeviceArray<float> out(device, p.accumulate ? before : std::vector(before.size(), kNan));
    p.y = from.data();
    p.slots = of.data();
    p.weights = by.data();
    p.out = out.data();
    device.CombineExperts(p);
    return out.Read();
  }
};

TEST_CASE_FIXTURE(DeviceSuite, "the rows of a token's experts are added with their weights" *
                                   doctest::test_suite("small")) {
  constexpr int kTokens = 5;
  for (const int dim : {1, 64, 515, 1028}) {
    for (const int top_k : {1, 3, 8}) {
      const int pairs = kTokens * top_k;
      Ids slots(static_cast<size_t>(pairs));
      std::iota(slots.begin(), slots.end(), 0);
      std::ranges::shuffle(slots, std::mt19937(1));
      ExpertRows rows = {RandomVector(int64_t{pairs} * dim, 1), RandomVector(kTokens * dim, 3),
                         RandomVector(pairs, 2), slots};
      CombineExpertsParams p = {.num_tokens = kTokens, .top_k = top_k, .dim = dim};
      const auto check = [&] {
        CheckNear(OnAll([&](Device& device) { return rows.Run(device, p); }),
                  rows.Combine(p, relative()));
      };
      CAPTURE(dim);
      CAPTURE(top_k);
      check();
      p.sigmoid = true;  // as a shared expert
      rows.slots = {};
      check();
      p = {.num_tokens = kTokens, .top_k = top_k, .dim = dim, .scale = 0.3f, .accumulate = false};
      rows.weights = {};
      check();
    }
  }
}

}  // namespace turbomind::testing
