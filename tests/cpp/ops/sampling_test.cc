#include "turbomind/ops/sampling.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "turbomind/core/check.h"
#include "turbomind/ops/row_math.h"
#include "turbomind/ops/sampling_math.h"

using namespace turbomind;

namespace {

struct Request : SamplingRequest {
  std::vector<int32_t> prompt;
};

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

SampleResult Sample(const std::vector<float>& logits, const Request& request,
                    const std::vector<int32_t>& generated = {},
                    const std::vector<uint32_t>* mask = nullptr) {
  std::vector<float> row = logits;
  std::vector<int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), generated.begin(), generated.end());
  Sampler sampler(static_cast<int>(logits.size()));
  SampleInput input;
  input.logits = row.data();
  input.request = &request;
  input.tokens = tokens.data();
  input.num_tokens = static_cast<int64_t>(tokens.size());
  input.num_generated = static_cast<int64_t>(generated.size());
  input.token_mask = mask == nullptr ? nullptr : mask->data();
  return sampler.Sample(input);
}

// Returns the field of the InvalidArgument that sampling throws.
std::string WrongField(const std::vector<float>& logits, const Request& request) {
  try {
    Sample(logits, request);
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find(error.field() + " ") == 0);
    return error.field();
  }
  return "nothing is wrong";
}

std::vector<float> RandomLogits(int n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.f, 3.f);
  std::vector<float> logits(static_cast<size_t>(n));
  for (float& logit : logits) {
    logit = normal(random);
  }
  return logits;
}

// Returns how often each token is sampled over `count` seeds.
std::map<int32_t, int> Samples(const std::vector<float>& logits, Request& request, int count) {
  std::map<int32_t, int> counts;
  request.sampling.do_sample = true;
  for (int seed = 0; seed < count; ++seed) {
    request.sampling.seed = static_cast<uint64_t>(seed);
    const SampleResult result = Sample(logits, request);
    ++counts[result.token];
  }
  return counts;
}

// Returns probabilities by the plain definition: sort all tokens, filter, renormalize.
std::map<int32_t, double> Reference(const std::vector<float>& logits, const SamplingParams& p) {
  std::vector<std::pair<double, int32_t>> all;
  const double max = *std::max_element(logits.begin(), logits.end());
  for (size_t i = 0; i < logits.size(); ++i) {
    all.emplace_back(std::exp((logits[i] - max) / p.temperature), static_cast<int32_t>(i));
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  if (p.top_k > 0 && p.top_k < static_cast<int>(all.size())) {
    all.resize(static_cast<size_t>(p.top_k));
  }
  double total = 0;
  for (const auto& [weight, id] : all) {
    total += weight;
  }
  std::map<int32_t, double> kept;
  double reached = 0;
  double sum = 0;
  for (const auto& [weight, id] : all) {
    if ((!kept.empty() && reached >= p.top_p * total) || weight < p.min_p) {
      break;
    }
    reached += weight;
    kept[id] = weight;
    sum += weight;
  }
  for (auto& [id, weight] : kept) {
    weight /= sum;
  }
  return kept;
}

// Compares sampled tokens with their probabilities by Pearson's chi-squared statistic. All tokens
// that are expected fewer than 5 times count as one.
void CheckDistribution(const std::vector<float>& logits, Request& request) {
  constexpr int kSamples = 20000;
  const std::map<int32_t, double> want = Reference(logits, request.sampling);
  std::map<int32_t, int> got = Samples(logits, request, kSamples);
  double chi2 = 0;
  int cells = 0;
  double rest_want = 0;
  double rest_got = 0;
  for (const auto& [id, probability] : want) {
    const double expected = probability * kSamples;
    if (expected < 5) {
      rest_want += expected;
      rest_got += got[id];
      continue;
    }
    chi2 += (got[id] - expected) * (got[id] - expected) / expected;
    ++cells;
  }
  if (rest_want > 0) {
    chi2 += (rest_got - rest_want) * (rest_got - rest_want) / std::max(rest_want, 1.0);
    ++cells;
  }
  for (const auto& [id, count] : got) {
    CHECK_MESSAGE((count == 0 || want.contains(id)),
                  "token " << id << " was sampled, but filters exclude it");
  }
  // The mean is cells - 1 and the standard deviation sqrt(2 (cells - 1)). The limit is five
  // deviations. Seeds are fixed, so the result is always the same.
  CHECK(chi2 < cells + 5 * std::sqrt(2.0 * cells) + 5);
}

}  // namespace

TEST_CASE("greedy sampling chooses the highest logit, and the lowest id on ties") {
  for (int vocab : {1, 15, 16, 17, 1000}) {
    Request request;
    std::vector<float> logits(static_cast<size_t>(vocab), -1.f);
    CHECK(Sample(logits, request).token == 0);
    logits.back() = 2.f;
    CHECK(Sample(logits, request).token == vocab - 1);
    logits[logits.size() / 2] = 2.f;
    CHECK(Sample(logits, request).token == vocab / 2);
  }
}

TEST_CASE("top_k 1 and temperature 0 are greedy") {
  const std::vector<float> logits = RandomLogits(100, 1);
  Request request;
  const int32_t best = Sample(logits, request).token;
  request.sampling.do_sample = true;
  request.sampling.temperature = 0.f;
  CHECK(Sample(logits, request).token == best);
  request.sampling.temperature = 5.f;
  request.sampling.top_k = 1;
  CHECK(Sample(logits, request).token == best);
}

TEST_CASE("IsPlainArgMax is true only if a request needs nothing but the argmax") {
  const auto takes = [](const std::function<void(Request&)>& set, int64_t num_generated = 0) {
    Request request;
    set(request);
    return IsPlainArgMax(request, num_generated);
  };
  CHECK(takes([](Request&) {}));
  CHECK(takes([](Request& r) { r.sampling.temperature = 0.5f; }));
  CHECK(takes([](Request& r) { r.stop_sequences = {{1}}; }));
  CHECK(takes([](Request& r) {
    r.sampling.do_sample = true;
    r.sampling.temperature = 0.f;
  }));
  CHECK(takes([](Request& r) { r.min_new_tokens = 3; }, 3));
  CHECK(!takes([](Request& r) { r.min_new_tokens = 3; }, 2));
  CHECK(!takes([](Request& r) { r.sampling.do_sample = true; }));
  CHECK(!takes([](Request& r) { r.sampling.num_logprobs = 0; }));
  CHECK(!takes([](Request& r) { r.sampling.logit_bias = {{1, 1.f}}; }));
  CHECK(!takes([](Request& r) { r.sampling.repetition_penalty = 2.f; }));
  CHECK(!takes([](Request& r) { r.sampling.presence_penalty = 1.f; }));
  CHECK(!takes([](Request& r) { r.sampling.frequency_penalty = 1.f; }));
  CHECK(!takes([](Request& r) { r.bad_sequences = {{1}}; }));
  CHECK(!takes([](Request& r) { r.token_mask = [](const auto&, auto&) { return true; }; }));
  CHECK(!takes([](Request& r) { r.sampling.top_p = 2.f; }));  // an error that Sample reports
}

TEST_CASE("RowSamplingOf returns parameters only for rows that a device can sample") {
  const auto sampling = [](const std::function<void(Request&)>& set, int64_t num_generated = 0) {
    Request request;
    request.sampling.do_sample = true;
    set(request);
    return RowSamplingOf(request, num_generated);
  };
  const auto plain = sampling([](Request& r) {
    r.sampling.temperature = 0.5f;
    r.sampling.top_k = 7;
    r.sampling.top_p = 0.25f;
    r.sampling.min_p = 0.125f;
    r.sampling.seed = 3;
  });
  REQUIRE(plain);
  CHECK(plain->inverse_temperature == 2.f);
  CHECK(plain->top_k == 7);
  CHECK(plain->top_p == 0.25f);
  CHECK(plain->min_p == 0.125f);
  const auto uniform = [&](uint64_t seed, int64_t num_generated) {
    return sampling([&](Request& r) { r.sampling.seed = seed; }, num_generated)->uniform;
  };
  CHECK(plain->uniform == uniform(3, 0));
  CHECK(uniform(3, 0) != uniform(3, 1));
  CHECK(uniform(3, 0) != uniform(4, 0));
  CHECK(!sampling([](Request& r) { r.sampling.do_sample = false; }));
  CHECK(!sampling([](Request& r) { r.sampling.temperature = 0.f; }));
  CHECK(!sampling([](Request& r) { r.sampling.top_k = 1; }));
  CHECK(sampling([](Request& r) { r.min_new_tokens = 3; }, 3));
  CHECK(!sampling([](Request& r) { r.min_new_tokens = 3; }, 2));
  CHECK(!sampling([](Request& r) { r.sampling.num_logprobs = 0; }));
  CHECK(!sampling([](Request& r) { r.sampling.logit_bias = {{1, 1.f}}; }));
  CHECK(!sampling([](Request& r) { r.sampling.repetition_penalty = 2.f; }));
  CHECK(!sampling([](Request& r) { r.bad_sequences = {{1}}; }));
  CHECK(!sampling([](Request& r) { r.token_mask = [](const auto&, auto&) { return true; }; }));
  CHECK(!sampling([](Request& r) { r.sampling.top_p = 2.f; }));  // an error that Sample reports
}

TEST_CASE("a weight has the same bits computed singly and four at a time") {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> exponent(-100.f, 0.f);
  const auto same = [](float x) {
    const float one = WeightOf(x);
    const float other = ExpNegative(x);
    return FloatBits(one) == FloatBits(other);
  };
  int num_different = 0;
  for (int i = 0; i < 200000; ++i) {
    for (const float scale : {1.f, 1e-3f, 1e-7f}) {
      num_different += same(exponent(random) * scale) ? 0 : 1;
    }
  }
  CHECK(num_different == 0);
  for (const float x : {0.f, -0.f, -86.99999f, -87.f, -87.00001f, -1e-45f, -3e38f, -kInf}) {
    CHECK(same(x));
  }
  CHECK(WeightOf(0.f) == 1.f);
}

TEST_CASE("a lower logit's weight exceeds a higher logit's by at most the rounding error") {
  constexpr float kError = 5e-7f;  // twice the error of a weight, plus a rounding
  constexpr int kSteps = 1000000;
  float max_weight = 0.f;  // largest weight so far
  int num_wrong = 0;
  for (int i = 0; i <= kSteps; ++i) {
    float x = static_cast<float>(88. * i / kSteps - 88.);
    for (int j = 0; j < 2 && x <= 0.f; ++j, x = std::nextafter(x, 1.f)) {
      const float weight = WeightOf(x);
      num_wrong += max_weight <= weight * (1.f + kError) ? 0 : 1;
      max_weight = std::max(max_weight, weight);
    }
  }
  CHECK(num_wrong == 0);
  CHECK(max_weight == 1.f);
}

// Samples by the definition in ops/sampling_math.h, applied literally to all tokens in order.
int32_t SamplePlainly(const std::vector<float>& logits, const RowSampling& sampling) {
  const int vocab = static_cast<int>(logits.size());
  const float highest = *std::max_element(logits.begin(), logits.end());
  std::vector<std::pair<float, int32_t>> tokens;  // negated weights, so that the largest sort first
  double total = 0;
  for (int begin = 0; begin < vocab; begin += kSumBlock) {
    const int size = std::min(kSumBlock, vocab - begin);
    double lanes[kSumLanes] = {};
    double rest = 0;
    for (int i = 0; i < size; ++i) {
      const float logit = logits[static_cast<size_t>(begin + i)];
      const float weight = WeightOf((logit - highest) * sampling.inverse_temperature);
      tokens.emplace_back(-weight, begin + i);
      (i < size / kSumLanes * kSumLanes ? lanes[i % kSumLanes] : rest) += weight;
    }
    for (const double lane : lanes) {
      rest += lane;
    }
    total += rest;
  }
  std::sort(tokens.begin(), tokens.end());
  if (sampling.top_k > 0 && sampling.top_k < vocab) {
    tokens.resize(static_cast<size_t>(sampling.top_k));
    total = 0;
    for (const auto& [weight, id] : tokens) {
      total -= weight;
    }
  }
  std::vector<std::pair<float, int32_t>> kept;
  double sum = 0;
  for (const auto& [weight, id] : tokens) {
    if ((!kept.empty() && sum >= sampling.top_p * total) || -weight < sampling.min_p) {
      break;
    }
    kept.emplace_back(-weight, id);
    sum -= weight;
  }
  double left = sampling.uniform * sum;
  for (const auto& [weight, id] : kept) {
    if (left < weight) {
      return id;
    }
    left -= weight;
  }
  return kept.back().second;
}

TEST_CASE("sampled tokens are those of the definition for any vocabulary size") {
  for (const int vocab : {2, 9, 511, 520, 3000}) {
    for (uint32_t seed = 0; seed < 60; ++seed) {
      Request request;
      SamplingParams& params = request.sampling;
      params.do_sample = true;
      params.temperature = seed % 2 == 0 ? 0.7f : 1.5f;
      params.top_k = seed % 3 == 0 ? 0 : static_cast<int>(seed);
      params.top_p = seed % 3 == 0 ? 0.9f : 0.1f * static_cast<float>(seed % 11);
      params.min_p = seed % 5 == 0 ? 0.01f : 0.f;
      params.seed = seed;
      std::vector<float> logits = RandomLogits(vocab, seed);
      for (float& logit : logits) {
        logit = seed % 4 == 0 ? std::round(logit) : logit;  // many are equal
      }
      const auto sampling = RowSamplingOf(request, 0);
      if (sampling && !SamplesFromAll(*sampling, vocab)) {
        CAPTURE(vocab);
        CAPTURE(seed);
        CHECK(Sample(logits, request).token == SamplePlainly(logits, *sampling));
      }
    }
  }
}

TEST_CASE("sampled tokens follow the filtered distribution") {
  const std::vector<float> logits = RandomLogits(500, 2);
  const auto check = [&](const std::function<void(SamplingParams&)>& set) {
    Request request;
    set(request.sampling);
    CheckDistribution(logits, request);
  };
  check([](SamplingParams&) {});
  check([](SamplingParams& p) { p.temperature = 0.5f; });
  check([](SamplingParams& p) { p.temperature = 3.f; });
  check([](SamplingParams& p) { p.top_k = 7; });
  check([](SamplingParams& p) { p.top_p = 0.8f; });
  check([](SamplingParams& p) { p.min_p = 0.1f; });
  check([](SamplingParams& p) {
    p.top_k = 20;
    p.top_p = 0.9f;
    p.min_p = 0.02f;
    p.temperature = 1.5f;
  });
}

TEST_CASE("sampled tokens pass the filters in a large vocabulary") {
  const std::vector<float> logits = RandomLogits(150000, 3);
  for (int top_k : {0, 3, 40, 149999}) {
    for (float top_p : {0.f, 0.3f, 0.95f, 1.f}) {
      for (float min_p : {0.f, 0.05f}) {
        if (top_k == 149999 && top_p == 1.f) {
          continue;  // covered by the distribution test
        }
        Request request;
        request.sampling.top_k = top_k;
        request.sampling.top_p = top_p;
        request.sampling.min_p = min_p;
        const auto want = Reference(logits, request.sampling);
        for (const auto& [id, count] : Samples(logits, request, 20)) {
          CHECK(want.contains(id));
        }
      }
    }
  }
}

TEST_CASE("top_k keeps the lowest ids among equal logits") {
  const std::vector<float> logits(64, 0.5f);
  Request request;
  request.sampling.top_k = 4;
  std::set<int32_t> seen;
  for (const auto& [id, count] : Samples(logits, request, 300)) {
    seen.insert(id);
  }
  CHECK(seen == std::set<int32_t>{0, 1, 2, 3});
}

TEST_CASE("earlier calls of a sampler do not affect later ones") {
  constexpr int kVocab = 1500;  // several blocks of weights and a remainder
  Sampler used(kVocab);
  for (uint32_t round = 0; round < 60; ++round) {
    Request request;
    request.prompt = {1, 2, 3};
    request.sampling.do_sample = round % 7 != 0;
    request.sampling.seed = round;
    request.sampling.top_k = round % 3 == 1 ? 5 : 0;
    request.sampling.top_p = round % 4 == 1 ? 0.7f : 1.f;
    request.sampling.min_p = round % 5 == 1 ? 0.05f : 0.f;
    request.sampling.repetition_penalty = round % 2 == 1 ? 1.5f : 1.f;
    const std::vector<float> logits = RandomLogits(kVocab, round);
    std::vector<float> row = logits;
    const SampleInput input = {.logits = row.data(),
                               .request = &request,
                               .tokens = request.prompt.data(),
                               .num_tokens = 3};
    CHECK(used.Sample(input).token == Sample(logits, request).token);
  }
}

TEST_CASE("a token depends only on the logits, the seed and the step") {
  const std::vector<float> logits = RandomLogits(1000, 4);
  Request request;
  request.sampling.do_sample = true;
  request.sampling.seed = 99;
  const int32_t first = Sample(logits, request, {1, 2}).token;
  CHECK(Sample(logits, request, {1, 2}).token == first);
  CHECK(Sample(logits, request, {7, 8}).token == first);  // same step
  std::set<int32_t> steps;
  std::set<int32_t> seeds;
  std::vector<int32_t> generated;
  for (int i = 0; i < 30; ++i) {
    request.sampling.seed = 99;
    steps.insert(Sample(logits, request, generated).token);
    generated.push_back(1);
    request.sampling.seed = static_cast<uint64_t>(i);
    seeds.insert(Sample(logits, request).token);
  }
  CHECK(steps.size() > 5);
  CHECK(seeds.size() > 5);
}

TEST_CASE("penalties and logit_bias change the logits") {
  Request request;
  request.prompt = {0, 0};
  const std::vector<float> logits = {4.f, 3.f, -1.f, -1.5f};
  SUBCASE("repetition_penalty applies once to each prompt and generated token") {
    request.sampling.repetition_penalty = 2.f;
    CHECK(Sample(logits, request).token == 1);             // 2, 3
    CHECK(Sample(logits, request, {1}).token == 0);        // 2, 1.5
    CHECK(Sample(logits, request, {1, 1, 1}).token == 0);  // once, however often it occurs
    CHECK(Sample({-1.f, -1.9f}, request).token == 1);      // -2, -1.9
  }
  SUBCASE("presence_penalty applies once to each generated token") {
    request.sampling.presence_penalty = 1.5f;
    CHECK(Sample(logits, request).token == 0);
    CHECK(Sample(logits, request, {0}).token == 1);
    CHECK(Sample({4.f, 2.4f}, request, {0, 0, 0}).token == 0);
  }
  SUBCASE("frequency_penalty applies to each occurrence of a generated token") {
    request.sampling.frequency_penalty = 0.6f;
    CHECK(Sample(logits, request, {0}).token == 0);
    CHECK(Sample(logits, request, {0, 0}).token == 1);
    request.sampling.frequency_penalty = INFINITY;
    CHECK(WrongField(logits, request) == "frequency_penalty");
  }
  SUBCASE("logit_bias is added to logits and its token ids are checked") {
    request.sampling.logit_bias = {{2, 10.f}, {0, -1.f}};
    CHECK(Sample(logits, request).token == 2);
    request.sampling.logit_bias = {{4, 1.f}};
    CHECK(WrongField(logits, request) == "logit_bias");
  }
  SUBCASE("a failed row leaves clean scratch for the next row") {
    request.sampling.repetition_penalty = 2.f;
    Sampler sampler(4);
    std::vector<float> row = logits;
    const std::vector<int32_t> bad = {0, 1, 77};
    SampleInput input{row.data(), &request, bad.data(), 3, 1, nullptr};
    CHECK_THROWS_AS(sampler.Sample(input), InvalidArgument);
    const std::vector<int32_t> none;
    row = logits;
    input = {row.data(), &request, none.data(), 0, 0, nullptr};
    CHECK(sampler.Sample(input).token == 0);
  }
}

TEST_CASE("bad sequences, early stops and the mask exclude tokens") {
  Request request;
  request.prompt = {5, 6};
  const std::vector<float> logits = {1.f, 5.f, 4.f, 3.f, 2.f, 0.f, 0.f, 0.f};
  SUBCASE("bad sequences of any length match across prompt and generated tokens") {
    request.bad_sequences = {{1}, {5, 6, 2}, {9, 9, 9, 3}, {}};
    CHECK(Sample(logits, request).token == 3);
    CHECK(Sample(logits, request, {0}).token == 2);
  }
  SUBCASE("EOS and stop sequences wait for min_new_tokens") {
    request.eos_ids = {1};
    request.stop_sequences = {{7, 2}, {3}};
    request.min_new_tokens = 2;
    CHECK(Sample(logits, request).token == 2);
    CHECK(Sample(logits, request, {7}).token == 4);
    CHECK(Sample(logits, request, {7, 7}).token == 1);
  }
  SUBCASE("a token mask excludes tokens") {
    const std::vector<uint32_t> mask = {0b11101001};
    CHECK(Sample(logits, request, {}, &mask).token == 3);
    const std::vector<uint32_t> nothing = {0};
    CHECK_THROWS_WITH_AS(Sample(logits, request, {}, &nothing),
                         doctest::Contains("No token is allowed"), InvalidArgument);
  }
}

TEST_CASE("NaN and infinite logits are errors, but not of the request") {
  const char* const kNoNumbers = "The model computed NaN or infinite logits.";
  for (bool do_sample : {false, true}) {
    for (float poison : {kNaN, -kNaN, kInf}) {
      for (size_t at : {size_t{0}, size_t{40}, size_t{99}}) {
        std::vector<float> logits = RandomLogits(100, 5);
        logits[at] = poison;
        Request request;
        request.sampling.do_sample = do_sample;
        CHECK_THROWS_WITH_AS(Sample(logits, request), kNoNumbers, std::runtime_error);
      }
    }
  }
  std::vector<float> logits = RandomLogits(100, 5);
  logits[3] = -kInf;  // a model may mask tokens itself
  CHECK_NOTHROW(Sample(logits, Request()));
  CHECK_THROWS_WITH_AS(Sample(std::vector<float>(100, -kInf), Request()), kNoNumbers,
                       std::runtime_error);
}

TEST_CASE("parameters out of range are errors") {
  const auto wrong = [](const std::function<void(SamplingParams&)>& set) {
    Request request;
    request.sampling.do_sample = true;
    set(request.sampling);
    return WrongField(RandomLogits(10, 6), request);
  };
  CHECK(wrong([](SamplingParams& p) { p.temperature = kNaN; }) == "temperature");
  CHECK(wrong([](SamplingParams& p) { p.temperature = -1.f; }) == "temperature");
  CHECK(wrong([](SamplingParams& p) { p.top_p = 1.5f; }) == "top_p");
  CHECK(wrong([](SamplingParams& p) { p.min_p = kNaN; }) == "min_p");
  CHECK(wrong([](SamplingParams& p) { p.repetition_penalty = 0.f; }) == "repetition_penalty");
  CHECK(wrong([](SamplingParams& p) { p.presence_penalty = kInf; }) == "presence_penalty");
}

TEST_CASE("log-probabilities are those of the model's logits before filters") {
  const std::vector<float> logits = RandomLogits(5003, 7);
  double total = 0;
  for (float logit : logits) {
    total += std::exp(static_cast<double>(logit));
  }
  Request request;
  request.sampling.do_sample = true;
  request.sampling.temperature = 0.3f;
  request.sampling.top_k = 2;
  request.sampling.num_logprobs = 5;
  const SampleResult result = Sample(logits, request);
  const auto logprob = [&](int32_t id) {
    return logits[static_cast<size_t>(id)] - std::log(total);
  };
  constexpr double kTolerance = 2e-6;
  CHECK(std::abs(result.logprobs.chosen - logprob(result.token)) < kTolerance);
  std::vector<int32_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int32_t>(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  REQUIRE(result.logprobs.top.size() == 5);
  for (size_t i = 0; i < 5; ++i) {
    CHECK(result.logprobs.top[i].first == order[i]);
    CHECK(std::abs(result.logprobs.top[i].second - logprob(order[i])) < kTolerance);
  }
  request.sampling.num_logprobs = 0;
  CHECK(Sample(logits, request).logprobs.top.empty());
  const TokenLogprobs ties = ComputeLogprobs(std::vector<float>(9, 1.f).data(), 9, 8, 3);
  CHECK(ties.top[0].first == 0);
  CHECK(ties.top[2].first == 2);
  CHECK(std::abs(ties.chosen + std::log(9.f)) < kTolerance);
}
