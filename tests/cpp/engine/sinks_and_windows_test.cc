// The effect of attention sinks and sliding windows on the engine's logits, in prefill and decode
// and in every KV format.

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/tiny_model.h"
#include "sanitized_sample.h"

namespace turbomind {
namespace {

using testing::TinyOptions;

constexpr int kPrompt = 150;
constexpr int kNewTokens = 24;

// Returns the logits of the prompt's last token and of every generated token but the last.
std::vector<float> Logits(const ModelConfig& model, const EngineConfig& config,
                          const std::vector<int32_t>& prompt, const TinyOptions& options = {}) {
  std::shared_ptr<Device> device = MakeCpuDevice(1);
  auto weights = testing::TinyWeights(model, *device, options);
  Engine engine(model, config, std::move(weights), device, testing::kFreeBytes);
  auto request = testing::MakeRequest(1, prompt, kNewTokens);
  request->logits_output = LogitsOutput::kGeneration;
  request->ignore_eos = true;
  const RequestOutput output = testing::RunOne(engine, request);
  CHECK(output.error == "");
  REQUIRE(output.logits.size() == size_t{kNewTokens} * testing::kVocab);
  return output.logits;
}

// Returns configs for every KV format, without and with a 16-bit window.
std::vector<EngineConfig> Configs() {
  std::vector<EngineConfig> configs;
  for (KvCacheMode format : kAllKvCacheModes) {
    configs.push_back(testing::TinyEngineConfig(format));
    configs.push_back(configs.back());
    configs.back().kv_quality = {.rotate_k = true, .window16 = {64, 64}};
  }
  return configs;
}

// Two prompts that differ only in their first tokens.
struct Pair {
  std::vector<int32_t> a;
  std::vector<int32_t> b;
};

Pair DifferentBeginnings(int num_different) {
  Pair pair;
  pair.a = testing::RandomPrompt(1, kPrompt);
  pair.b = pair.a;
  for (int i = 0; i < num_different; ++i) {
    int32_t& token = pair.b[static_cast<size_t>(i)];
    token = (token + 1) % testing::kVocab;
  }
  return pair;
}

TEST_CASE("a token influences the logits only if the sliding windows reach it") {
  constexpr int kWindow = 16;
  ModelConfig model = testing::TinyGptOss();
  std::ranges::fill(model.windows, kWindow);
  // Each layer lets a token see kWindow - 1 tokens further back.
  const int reach = model.num_layers * (kWindow - 1);
  const Pair unseen = DifferentBeginnings(kPrompt - 1 - reach);
  const Pair seen = DifferentBeginnings(kPrompt - reach);
  testing::SanitizedSample sample(5);
  for (const EngineConfig& config : Configs()) {
    if (!sample.Next()) {
      continue;
    }
    CAPTURE(std::string(ToString(config.kv_format)));
    const std::vector<float> want = Logits(model, config, unseen.a);
    CHECK(Logits(model, config, unseen.b) == want);
    CHECK(Logits(model, config, seen.b) != want);
    ModelConfig wide = model;
    wide.windows[1] = 0;
    CHECK(Logits(wide, config, unseen.b) != Logits(wide, config, unseen.a));
  }
}

TEST_CASE("sinks are part of every softmax, and large sinks leave the context no weight") {
  const ModelConfig model = testing::TinyGptOss();
  const Pair pair = DifferentBeginnings(kPrompt - 1);
  testing::SanitizedSample sample(5);
  for (const EngineConfig& config : Configs()) {
    if (!sample.Next()) {
      continue;
    }
    CAPTURE(std::string(ToString(config.kv_format)));
    // With weights of e^-1000, no V changes a value of the residual.
    const TinyOptions large = {.sink_offset = 1000.f};
    CHECK(Logits(model, config, pair.a, large) == Logits(model, config, pair.b, large));
    CHECK(Logits(model, config, pair.a) != Logits(model, config, pair.b));
    const std::vector<float> with = Logits(model, config, pair.a);
    CHECK(Logits(model, config, pair.a, {.sinks = false}) != with);
  }
}

}  // namespace
}  // namespace turbomind
