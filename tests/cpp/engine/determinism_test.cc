// Tokens and logits have the same bits for any batch, chunking, prefix hits, preemption and number
// of threads, in every KV format and quality.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <optional>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "sanitized_sample.h"

namespace turbomind {
namespace {

using testing::Collect;
using testing::MakeRequest;
using testing::RandomPrompt;
using testing::TinyEngine;
using testing::TinyEngineConfig;

constexpr int kNewTokens = 24;
constexpr int kNumRequests = 8;

// Eight prompts. Those with at least 130 and at least `shared` tokens begin with the same `shared`
// tokens.
struct Prompts {
  std::array<int, kNumRequests> lengths;
  int shared;
};
// Lengths around the block (16), the sliding window (40) and the attention tile (64).
constexpr Prompts kShort = {{1, 15, 16, 63, 65, 130, 150, 150}, 100};
// Long enough that blocks leave the 16-bit window, which holds the first 64 and the newest 64
// tokens.
constexpr Prompts kLong = {{1, 63, 129, 144, 200, 290, 330, 330}, 250};

std::vector<std::shared_ptr<Request>> Requests(uint64_t first_id, const Prompts& prompts) {
  const std::vector<int32_t> shared = RandomPrompt(99, prompts.shared);
  std::vector<std::shared_ptr<Request>> requests;
  for (size_t i = 0; i < kNumRequests; ++i) {
    auto prompt = RandomPrompt(static_cast<uint32_t>(i), prompts.lengths[i]);
    if (prompts.lengths[i] >= prompts.shared && prompts.lengths[i] >= 130) {
      std::copy(shared.begin(), shared.end(), prompt.begin());
    }
    auto request = MakeRequest(first_id + i, prompt, kNewTokens);
    request->logits_output = LogitsOutput::kGeneration;
    request->sampling.do_sample = i % 2 == 1;
    request->sampling.seed = i;
    requests.push_back(request);
  }
  return requests;
}

using Answers = std::map<uint64_t, RequestOutput>;

// One way to run the same requests.
struct Setting {
  ModelConfig model = testing::TinyConfig();
  EngineConfig config;
  Prompts prompts = kShort;
  testing::TinyOptions weights = {};
  std::optional<ModelConfig> draft_model = {};
};

Answers RunAll(Engine& engine, uint64_t first_id, const Prompts& prompts) {
  for (auto& request : Requests(first_id, prompts)) {
    engine.Submit(request);
  }
  return Collect(engine, kNumRequests);
}

std::unique_ptr<Engine> MakeEngine(const Setting& setting, int num_threads = 1) {
  std::shared_ptr<Device> device = MakeCpuDevice(num_threads);
  auto weights = testing::TinyWeights(setting.model, *device, setting.weights);
  EngineConfig config = setting.config;
  if (setting.draft_model) {
    config.draft_model = std::make_shared<DraftModel>(
        *setting.draft_model, testing::TinyWeights(*setting.draft_model, *device, setting.weights));
  }
  return std::make_unique<Engine>(setting.model, config, std::move(weights), std::move(device),
                                  testing::kFreeBytes);
}

Answers RunAll(const Setting& setting, int num_threads = 1) {
  return RunAll(*MakeEngine(setting, num_threads), 0, setting.prompts);
}

Answers OneByOne(const Setting& setting) {
  auto engine = MakeEngine(setting);
  Answers answers;
  for (auto& request : Requests(0, setting.prompts)) {
    engine->Submit(request);
    answers.merge(Collect(*engine, 1));
  }
  return answers;
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

void CheckPrefixHits(Setting setting, const Answers& want) {
  setting.config.enable_prefix_caching = true;
  auto engine = MakeEngine(setting);
  CheckEqual(RunAll(*engine, 0, setting.prompts), 0, want);
  const Answers again = RunAll(*engine, 100, setting.prompts);
  CheckEqual(again, 100, want);
  CHECK(again.at(107).cached_tokens >= 96);
  CHECK(engine->stats().prefix_hit_tokens > 0);
}

// Runs with too few blocks for all requests together, so that some are preempted.
void CheckPreemption(Setting setting, int num_blocks, const Answers& want) {
  setting.config.max_prefill_token_num = 32;
  setting.config.cache_max_entry_count = num_blocks;
  for (const bool prefix_caching : {false, true}) {
    setting.config.enable_prefix_caching = prefix_caching;
    auto device = std::make_shared<testing::SlowStepDevice>(MakeCpuDevice(1));
    Engine engine(setting.model, setting.config,
                  testing::TinyWeights(setting.model, *device, setting.weights), device,
                  testing::kFreeBytes);
    for (auto& request : Requests(0, setting.prompts)) {
      engine.Submit(request);
    }
    device->LetStart();
    CheckEqual(Collect(engine, kNumRequests), 0, want);
    CHECK(engine.stats().num_preemptions > 0);
  }
}

// Computes drafts, which the policy of the scheduler would refuse in part. The answers of a random
// model repeat, and it is a good draft of itself. A draft model has no recurrent layers.
void CheckDrafts(Setting setting, const Answers& want) {
  setting.config.num_draft_tokens = 4;
  auto engine = MakeEngine(setting);
  CheckEqual(RunAll(*engine, 0, setting.prompts), 0, want);
  CHECK(engine->stats().draft_tokens > 0);
  CHECK(engine->stats().accepted_tokens > 0);
  const bool recurs = setting.model.recurrent.HasAny();
  setting.draft_model = recurs ? testing::TinyConfig() : setting.model;
  engine = MakeEngine(setting);
  CheckEqual(RunAll(*engine, 0, setting.prompts), 0, want);
  CHECK((recurs || engine->stats().accepted_tokens > 0));
}

void CheckChunks(Setting setting, const Answers& want) {
  for (const int chunk : {16, 64}) {
    setting.config.max_prefill_token_num = chunk;
    CheckEqual(RunAll(setting), 0, want);
  }
}

// REQUIRES: `num_blocks` is less than the requests need together.
void CheckEveryWay(const Setting& setting, int num_blocks) {
  const Answers want = OneByOne(setting);
  INFO("a batch of eight");
  CheckEqual(RunAll(setting), 0, want);
  INFO("chunks of 16 and 64");
  CheckChunks(setting, want);
  INFO("drafts");
  CheckDrafts(setting, want);
  INFO("two threads");
  CheckEqual(RunAll(setting, 2), 0, want);
  INFO("prefix hits");
  CheckPrefixHits(setting, want);
  INFO("preemption");
  CheckPreemption(setting, num_blocks, want);
}

TEST_CASE("a request gives the same bits however it is run") {
  testing::SanitizedSample sample(4);
  for (KvCacheMode format : kAllKvCacheModes) {
    if (!sample.Next()) {
      continue;
    }
    CAPTURE(std::string(ToString(format)));
    Setting setting{.config = TinyEngineConfig(format)};
    setting.config.enable_prefix_caching = false;
    CheckEveryWay(setting, 16);
  }
}

// Returns random constants in the form of a calibration.
KvCalibration TinyCalibration(const ModelConfig& model) {
  testing::RandomValues random(3);
  const int64_t heads = model.num_kv_heads;
  KvCalibration calibration;
  for (int i = 0; i < model.num_layers; ++i) {
    calibration.k_mean.push_back(random.Uniform(heads * model.head_dim, -2.f, 2.f));
    calibration.k_scales.push_back(random.Uniform(heads, 0.01f, 0.1f));
    calibration.v_scales.push_back(random.Uniform(heads, 0.01f, 0.1f));
  }
  return calibration;
}

TEST_CASE("models of every structure give the same bits however they are run") {
  testing::SanitizedSample sample(3);
  for (const ModelConfig& model :
       {testing::TinyGemma(), testing::TinyParallel(), testing::TinySigmoidMoe(),
        testing::TinyHybrid(), testing::TinyBranches(), testing::TinyConvolutions(),
        testing::TinyGemma4()}) {
    for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp4Nv}) {
      if (!sample.Next()) {
        continue;
      }
      CAPTURE(model.num_layers);
      CAPTURE(std::string(ToString(format)));
      Setting setting{.model = model, .config = TinyEngineConfig(format)};
      setting.config.enable_prefix_caching = false;
      if (format == KvCacheMode::kFp4Nv) {
        setting.prompts = kLong;
        setting.config.kv_quality = {.rotate_k = true, .window16 = {64, 64}};
      }
      CheckEveryWay(setting, format == KvCacheMode::kFp4Nv ? 26 : 16);
    }
  }
}

TEST_CASE("models with latents give the same bits however they are run") {
  testing::SanitizedSample sample(3);
  bool k_offset = false;  // of every second model
  for (const ModelConfig& model : {testing::TinyDeepSeek(), testing::TinyGlm()}) {
    for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp4Nv}) {
      if (!sample.Next()) {
        continue;
      }
      CAPTURE(model.latent.q_rank);
      CAPTURE(std::string(ToString(format)));
      Setting setting{.model = model, .config = TinyEngineConfig(format)};
      setting.model.embedding_scale = 8.f;  // answers repeat, as drafts need it
      setting.config.enable_prefix_caching = false;
      if (format == KvCacheMode::kFp4Nv) {
        setting.prompts = kLong;
        setting.config.kv_quality = {
            .rotate_k = true, .search_scales = true, .window16 = {64, 64}, .k_offset = k_offset};
      }
      CheckEveryWay(setting, format == KvCacheMode::kFp4Nv ? 26 : 16);
    }
    k_offset = !k_offset;
  }
}

TEST_CASE("balanced and best give the same bits when blocks leave the 16-bit window") {
  testing::SanitizedSample sample(7);
  for (KvCacheMode format : kAllKvCacheModes) {
    for (const bool best : {false, true}) {
      if (!sample.Next()) {
        continue;
      }
      CAPTURE(std::string(ToString(format)));
      CAPTURE(best);
      Setting setting{.config = TinyEngineConfig(format), .prompts = kLong};
      setting.model.windows = {0, 170};
      setting.config.enable_prefix_caching = false;
      setting.config.kv_quality = {
          .rotate_k = true, .search_scales = true, .window16 = {64, 64}, .k_offset = true};
      if (best) {
        setting.config.kv_quality.calibration = TinyCalibration(setting.model);
      }
      CheckEveryWay(setting, 26);
    }
  }
}

TEST_CASE("the same bits with 16-bit blocks and layers in 16 bit") {
  const block::Config::LayerFormats nvfp4 = {KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv};
  testing::SanitizedSample sample(3);
  for (const int window : {0, 170}) {
    for (const size_t sixteen_bit : {0, 1}) {
      if (!sample.Next()) {
        continue;
      }
      CAPTURE(window);
      CAPTURE(sixteen_bit);
      Setting setting{.config = TinyEngineConfig(KvCacheMode::kFp4Nv), .prompts = kLong};
      setting.model.windows = {0, window};
      setting.config.kv_layers = {nvfp4, nvfp4};
      setting.config.kv_layers[sixteen_bit] = {};
      setting.config.enable_prefix_caching = false;
      setting.config.kv_quality = {.rotate_k = true, .search_scales = true, .window16 = {64, 64}};
      CheckEveryWay(setting, 26);
    }
  }
}

TEST_CASE("each quality option changes the logits") {
  Setting setting{.config = TinyEngineConfig(KvCacheMode::kFp4Nv), .prompts = kLong};
  const Answers raw = OneByOne(setting);
  setting.config.kv_quality.window16 = {64, 64};
  const Answers window16 = OneByOne(setting);
  setting.config.kv_quality.rotate_k = true;
  const Answers rotated = OneByOne(setting);
  setting.config.kv_quality.search_scales = true;
  const Answers searched = OneByOne(setting);
  setting.config.kv_quality.calibration = TinyCalibration(setting.model);
  const Answers best = OneByOne(setting);
  CHECK(raw.at(7).logits != window16.at(7).logits);
  CHECK(window16.at(7).logits != rotated.at(7).logits);
  CHECK(rotated.at(7).logits != searched.at(7).logits);
  CHECK(searched.at(7).logits != best.at(7).logits);
}

TEST_CASE("BF16 and Q8_0 weights, whose activations are rounded, give the same bits") {
  EngineConfig config = TinyEngineConfig(KvCacheMode::kFp4Nv);
  const Answers want = RunAll(*TinyEngine(config, 1, true), 0, kShort);
  for (const int chunk : {16, 64, 2048}) {
    for (const int threads : {1, 2}) {
      config.max_prefill_token_num = chunk;
      CheckEqual(RunAll(*TinyEngine(config, threads, true), 0, kShort), 0, want);
    }
  }
}

TEST_CASE("experts, sinks and alternating sliding windows give the same bits") {
  testing::SanitizedSample sample(5);
  for (KvCacheMode format : kAllKvCacheModes) {
    if (!sample.Next()) {
      continue;
    }
    CAPTURE(std::string(ToString(format)));
    Setting setting{.model = testing::TinyGptOss(), .config = TinyEngineConfig(format)};
    setting.config.enable_prefix_caching = false;
    CheckEveryWay(setting, 16);
  }
}

TEST_CASE("experts and sinks give the same bits with a 16-bit window and K without its mean") {
  testing::SanitizedSample sample(2);
  for (KvCacheMode format : {KvCacheMode::kInt4, KvCacheMode::kFp4Nv}) {
    if (!sample.Next()) {
      continue;
    }
    CAPTURE(std::string(ToString(format)));
    Setting setting{.model = testing::TinyGptOss(),
                    .config = TinyEngineConfig(format),
                    .prompts = kLong,
                    .weights = {.quantized = true}};
    setting.config.enable_prefix_caching = false;
    setting.config.kv_quality = {.rotate_k = true, .search_scales = true, .window16 = {64, 64}};
    setting.config.kv_quality.calibration = TinyCalibration(setting.model);
    CheckEveryWay(setting, 26);
  }
}

TEST_CASE("a dense layer and a shared expert give the same bits") {
  Setting setting{.model = testing::TinyQwenMoe(), .config = TinyEngineConfig(KvCacheMode::kInt8)};
  setting.config.enable_prefix_caching = false;
  CheckEveryWay(setting, 16);
}

}  // namespace
}  // namespace turbomind
