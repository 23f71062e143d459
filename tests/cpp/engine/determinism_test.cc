// Tokens and logits are the same bits whatever the batch, the chunking, prefix hits, preemption and
// the number of threads, in every KV mode.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "engine/null_device.h"
#include "engine/tiny_model.h"

namespace turbomind {
namespace {

using testing::Collect;
using testing::MakeRequest;
using testing::RandomPrompt;
using testing::TinyEngine;
using testing::TinyEngineConfig;

constexpr int kNewTokens = 24;
constexpr int kNumRequests = 8;

// Lengths around the block (16), the window (40) and the attention tile (64); the last ones share a
// prefix of several blocks.
std::vector<std::shared_ptr<Request>> Requests(uint64_t first_id) {
  const int lengths[kNumRequests] = {1, 15, 16, 63, 65, 130, 150, 150};
  const std::vector<int32_t> shared = RandomPrompt(99, 100);
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < kNumRequests; ++i) {
    auto prompt = RandomPrompt(static_cast<uint32_t>(i), lengths[i]);
    if (lengths[i] >= 130) {
      std::copy(shared.begin(), shared.end(), prompt.begin());
    }
    auto request = MakeRequest(first_id + static_cast<uint64_t>(i), prompt, kNewTokens);
    request->logits_output = LogitsOutput::kGeneration;
    request->sampling.do_sample = i % 2 == 1;
    request->sampling.seed = static_cast<uint64_t>(i);
    requests.push_back(request);
  }
  return requests;
}

using Answers = std::map<uint64_t, RequestOutput>;

Answers RunAll(Engine& engine, uint64_t first_id, bool one_by_one) {
  Answers answers;
  for (auto& request : Requests(first_id)) {
    engine.Submit(request);
    if (one_by_one) {
      answers.merge(Collect(engine, 1));
    }
  }
  return one_by_one ? answers : Collect(engine, kNumRequests);
}

void CheckEqual(const Answers& got, uint64_t got_first, const Answers& want) {
  REQUIRE(want.size() == kNumRequests);
  REQUIRE(got.size() == kNumRequests);
  for (const auto& [id, output] : want) {
    const RequestOutput& other = got.at(got_first + id);
    CHECK(output.finish_reason == FinishReason::kLength);
    CHECK(output.tokens.size() == kNewTokens);
    CHECK(output.logits.size() == static_cast<size_t>(kNewTokens * testing::kVocab));
    CHECK(other.finish_reason == output.finish_reason);
    CHECK(other.error == output.error);
    CHECK(other.tokens == output.tokens);
    CHECK(other.logits == output.logits);
  }
}

TEST_CASE("the same bits however a request is run") {
  for (KvCacheMode mode : kAllKvCacheModes) {
    CAPTURE(std::string(ToString(mode)));
    EngineConfig config = TinyEngineConfig(mode);
    config.deterministic = true;
    config.enable_prefix_caching = false;
    const Answers want = RunAll(*TinyEngine(config), 0, true);
    SUBCASE("a batch of eight") { CheckEqual(RunAll(*TinyEngine(config), 0, false), 0, want); }
    SUBCASE("chunks of 16 and 64") {
      for (int chunk : {16, 64}) {
        config.max_prefill_token_num = chunk;
        CheckEqual(RunAll(*TinyEngine(config), 0, false), 0, want);
      }
    }
    SUBCASE("two threads") { CheckEqual(RunAll(*TinyEngine(config, 2), 0, false), 0, want); }
    SUBCASE("prefix hits") {
      config.enable_prefix_caching = true;
      auto engine = TinyEngine(config);
      CheckEqual(RunAll(*engine, 0, false), 0, want);
      const Answers again = RunAll(*engine, 100, false);
      CheckEqual(again, 100, want);
      CHECK(again.at(107).cached_tokens >= 96);
      CHECK(engine->stats().prefix_hit_tokens > 0);
    }
    SUBCASE("preemption") {
      for (bool prefix_caching : {false, true}) {
        config.enable_prefix_caching = prefix_caching;
        config.max_prefill_token_num = 32;
        config.cache_max_entry_count = 16;
        const ModelConfig model = testing::TinyConfig();
        auto device = std::make_shared<testing::WaitingDevice>(MakeCpuDevice(1));
        Engine engine(model, config, testing::TinyWeights(model, *device), device,
                      testing::kFreeBytes);
        for (auto& request : Requests(0)) {
          engine.Submit(request);
        }
        device->LetStart();
        CheckEqual(Collect(engine, kNumRequests), 0, want);
        CHECK(engine.stats().num_preemptions > 0);
      }
    }
  }
}

TEST_CASE("the same bits with BF16 and Q8_0 weights, whose activations are rounded") {
  EngineConfig config = TinyEngineConfig(KvCacheMode::kFp4Nv);
  config.deterministic = true;
  const Answers want = RunAll(*TinyEngine(config, 1, true), 0, true);
  for (const int chunk : {16, 64, 2048}) {
    for (const int threads : {1, 2}) {
      config.max_prefill_token_num = chunk;
      CheckEqual(RunAll(*TinyEngine(config, threads, true), 0, false), 0, want);
    }
  }
}

}  // namespace
}  // namespace turbomind
