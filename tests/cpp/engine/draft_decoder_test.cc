// A model as its own draft is always right, and no draft model changes an answer.

#include "turbomind/engine/draft_decoder.h"

#include <doctest/doctest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "sanitized_sample.h"
#include "turbomind/core/check.h"
#include "turbomind/engine/memory_plan.h"

namespace turbomind {
namespace {

using testing::Collect;
using testing::MakeRequest;
using testing::RandomPrompt;
using testing::TinyConfig;

constexpr int kNewTokens = 40;

EngineConfig Config(KvCacheMode format) {
  EngineConfig config = testing::TinyEngineConfig(format);
  config.num_draft_tokens = 4;
  return config;
}

// Returns an engine of TinyConfig() whose drafts come from `draft`; null: from nowhere.
std::unique_ptr<Engine> MakeEngine(const EngineConfig& base, const ModelConfig* draft,
                                   std::shared_ptr<Device> device = MakeCpuDevice(2)) {
  EngineConfig config = base;
  if (draft == nullptr) {
    config.num_draft_tokens = 0;
  } else {
    config.draft_model =
        std::make_shared<DraftModel>(*draft, testing::TinyWeights(*draft, *device));
  }
  auto weights = testing::TinyWeights(TinyConfig(), *device);
  return std::make_unique<Engine>(TinyConfig(), config, std::move(weights), std::move(device),
                                  testing::kFreeBytes);
}

TEST_CASE("a model as its own draft is always right") {
  const ModelConfig model = TinyConfig();
  const auto engine = MakeEngine(Config(KvCacheMode::kNone), &model);
  for (uint64_t id = 0; id < 3; ++id) {
    engine->Submit(MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), 70), kNewTokens));
  }
  Collect(*engine, 3);
  const EngineStats stats = engine->stats();
  CHECK(stats.generated_tokens == 3 * kNewTokens);
  CHECK(stats.draft_tokens > kNewTokens);
  CHECK(stats.accepted_tokens == stats.draft_tokens);
  CHECK(stats.num_steps < kNewTokens);
}

// Returns requests with everything that drafts could disturb.
std::vector<std::shared_ptr<Request>> Requests(int prompt_length = 90) {
  std::vector<std::shared_ptr<Request>> requests;
  for (uint64_t id = 0; id < 6; ++id) {
    auto prompt = RandomPrompt(static_cast<uint32_t>(id), prompt_length);
    auto request = MakeRequest(id, std::move(prompt), kNewTokens);
    request->sampling.num_logprobs = 2;
    request->sampling.do_sample = id % 2 == 1;
    request->sampling.temperature = 0.3f;
    request->sampling.seed = id;
    if (id >= 4) {
      request->token_mask = [](const auto&, auto& mask) {  // every second token
        mask.assign(mask.size(), 0x55555555u);
        return true;
      };
    }
    requests.push_back(request);
  }
  return requests;
}

std::map<uint64_t, RequestOutput> OneByOne(Engine& engine) {
  std::map<uint64_t, RequestOutput> outputs;
  for (auto& request : Requests()) {
    engine.Submit(request);
    outputs.merge(Collect(engine, 1));
  }
  return outputs;
}

std::map<uint64_t, RequestOutput> RunAll(Engine& engine) {
  for (auto& request : Requests()) {
    engine.Submit(request);
  }
  return Collect(engine, Requests().size());
}

void CheckEqual(const std::map<uint64_t, RequestOutput>& got,
                const std::map<uint64_t, RequestOutput>& want) {
  REQUIRE(got.size() == want.size());
  for (const auto& [id, output] : want) {
    CAPTURE(id);
    const RequestOutput& other = got.at(id);
    CHECK(output.tokens.size() == kNewTokens);
    CHECK(other.tokens == output.tokens);
    CHECK(other.finish_reason == output.finish_reason);
    REQUIRE(other.logprobs.size() == output.logprobs.size());
    for (size_t i = 0; i < output.logprobs.size(); ++i) {
      CHECK(other.logprobs[i].chosen == output.logprobs[i].chosen);
      CHECK(other.logprobs[i].top == output.logprobs[i].top);
    }
  }
}

TEST_CASE("no draft model changes tokens, log-probabilities or the effect of masks") {
  ModelConfig few_tokens = TinyConfig();
  few_tokens.vocab_size = testing::kVocab - 30;
  ModelConfig many_tokens = TinyConfig();
  many_tokens.vocab_size = testing::kVocab + 100;
  testing::SanitizedSample sample(4);
  for (const KvCacheMode format : kAllKvCacheModes) {
    if (!sample.Next()) {
      continue;
    }
    CAPTURE(std::string(ToString(format)));
    const auto want = RunAll(*MakeEngine(Config(format), nullptr));
    for (const ModelConfig& draft :
         {TinyConfig(), testing::TinyGemma(), testing::TinyGptOss(), few_tokens, many_tokens}) {
      CAPTURE(draft.num_layers);
      CAPTURE(draft.vocab_size);
      CheckEqual(RunAll(*MakeEngine(Config(format), &draft)), want);
      const auto engine = MakeEngine(Config(format), &draft);
      CheckEqual(OneByOne(*engine), want);
      // A model that lacks a token of the prompt drafts nothing.
      CHECK((engine->stats().draft_tokens > 0) == (draft.vocab_size >= testing::kVocab));
      CHECK(engine->stats().draft_tokens >= engine->stats().accepted_tokens);
    }
  }
}

std::map<uint64_t, RequestOutput> RunShort(Engine& engine, testing::SlowStepDevice& device) {
  for (auto& request : Requests(20)) {
    engine.Submit(request);
  }
  device.LetStart();
  return Collect(engine, Requests().size());
}

TEST_CASE("drafts follow sequences that are preempted, with few blocks and small steps") {
  EngineConfig config = Config(KvCacheMode::kNone);
  config.session_len = 64;
  config.max_prefill_token_num = 24;
  const auto make_device = [] {
    return std::make_shared<testing::SlowStepDevice>(MakeCpuDevice(2));
  };
  auto device = make_device();
  const auto want = RunShort(*MakeEngine(config, nullptr, device), *device);
  int64_t num_preemptions = 0;
  for (const ModelConfig& draft : {TinyConfig(), testing::TinyGemma()}) {
    for (const int num_blocks : {8, 10, 12}) {
      config.cache_max_entry_count = num_blocks;
      device = make_device();
      const auto engine = MakeEngine(config, &draft, device);
      CheckEqual(RunShort(*engine, *device), want);
      CHECK(engine->stats().draft_tokens > 0);
      num_preemptions += engine->stats().num_preemptions;
    }
  }
  CHECK(num_preemptions > 0);
}

TEST_CASE("the memory plan counts the draft model") {
  const ModelConfig model = TinyConfig();
  EngineConfig config = Config(KvCacheMode::kNone);
  constexpr int64_t kFree = int64_t{1} << 20;  // less than the sequences need
  const MemoryPlan alone = PlanMemory(model, config, kFree, {});
  CHECK(alone.draft_cache_bytes == 0);
  config.draft_model = std::make_shared<DraftModel>(model, nullptr);
  const MemoryPlan plan = PlanMemory(model, config, kFree, {});
  CHECK(plan.draft_cache_bytes > 0);
  CHECK(plan.draft_scratch_bytes == plan.scratch_bytes);
  CHECK(plan.reserved_bytes + plan.draft_cache_bytes <= kFree);
  CHECK(plan.max_tokens < alone.max_tokens);
  ModelConfig wide = model;
  wide.num_kv_heads = wide.num_heads = 2048;
  config.draft_model = std::make_shared<DraftModel>(wide, nullptr);
  CHECK_THROWS_AS(PlanMemory(model, config, kFree, {}), InvalidArgument);
}

}  // namespace
}  // namespace turbomind
