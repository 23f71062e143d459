// A response that another engine began continues with the same tokens (Request::num_resumed).

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/tiny_model.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::MakeRequest;
using testing::RandomPrompt;
using testing::RunOne;
using testing::TinyEngine;
using testing::TinyEngineConfig;

constexpr int kNewTokens = 24;

// Every option whose effect depends on the tokens generated so far.
std::shared_ptr<Request> MakeDependentRequest(uint64_t id, bool do_sample) {
  auto request = MakeRequest(id, RandomPrompt(5, 70), kNewTokens);
  request->sampling.do_sample = do_sample;
  request->sampling.seed = 42;
  request->sampling.repetition_penalty = 1.3F;
  request->sampling.presence_penalty = 0.4F;
  request->sampling.frequency_penalty = 0.7F;
  request->min_new_tokens = 12;
  return request;
}

TEST_CASE("a resumed response equals the unbroken one") {
  auto first = TinyEngine(TinyEngineConfig(KvCacheMode::kNone));
  auto second = TinyEngine(TinyEngineConfig(KvCacheMode::kNone));
  uint64_t id = 0;
  for (const bool do_sample : {false, true}) {
    CAPTURE(do_sample);
    const std::vector<int32_t> whole = RunOne(*first, MakeDependentRequest(++id, do_sample)).tokens;
    REQUIRE(whole.size() == kNewTokens);
    for (const int num_resumed : {1, 11, 12, 23}) {
      CAPTURE(num_resumed);
      auto request = MakeDependentRequest(++id, do_sample);
      request->num_resumed = num_resumed;
      request->prompt.insert(request->prompt.end(), whole.begin(), whole.begin() + num_resumed);
      const RequestOutput rest = RunOne(*second, request);
      CHECK(rest.tokens == std::vector<int32_t>(whole.begin() + num_resumed, whole.end()));
      CHECK(rest.finish_reason == FinishReason::kLength);
    }
  }
}

TEST_CASE("a stop sequence may begin in the resumed tokens") {
  auto engine = TinyEngine(TinyEngineConfig(KvCacheMode::kNone));
  const std::vector<int32_t> whole = RunOne(*engine, MakeDependentRequest(1, true)).tokens;
  auto request = MakeDependentRequest(2, true);
  request->min_new_tokens = 0;
  request->stop_sequences = {{whole[14], whole[15], whole[16]}};
  request->num_resumed = 16;
  request->prompt.insert(request->prompt.end(), whole.begin(), whole.begin() + 16);
  const RequestOutput rest = RunOne(*engine, request);
  CHECK(rest.tokens == std::vector<int32_t>{whole[16]});
  CHECK(rest.finish_reason == FinishReason::kStop);
  CHECK(rest.stop_tokens == 3);
}

TEST_CASE("token_mask receives the resumed tokens first") {
  auto engine = TinyEngine(TinyEngineConfig(KvCacheMode::kNone));
  std::vector<std::vector<int32_t>> received;
  auto request = MakeRequest(1, {1, 2, 3, 4}, 4);
  request->num_resumed = 2;
  request->token_mask = [&received](const std::vector<int32_t>& tokens,
                                    std::vector<uint32_t>& mask) {
    std::ranges::fill(mask, ~0U);
    received.push_back(tokens);
    return true;
  };
  const RequestOutput rest = RunOne(*engine, request);
  REQUIRE(rest.tokens.size() == 2);
  CHECK(received.at(0) == std::vector<int32_t>{3, 4});
  CHECK(received.at(1) == std::vector<int32_t>{rest.tokens[0]});
}

TEST_CASE("num_resumed must leave a prompt and a token to generate") {
  auto engine = TinyEngine(TinyEngineConfig(KvCacheMode::kNone));
  for (const int num_resumed : {-1, 3, 4, 5}) {
    auto request = MakeRequest(1, {1, 2, 3, 4}, 3);
    request->num_resumed = num_resumed;
    CHECK_THROWS_AS(engine->Submit(request), InvalidArgument);
  }
}

}  // namespace
}  // namespace turbomind
