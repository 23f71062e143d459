// An engine with recurrent layers, small pools, drafts and cancelled requests: no answer changes,
// and no state is lost.

#include <doctest/doctest.h>

#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine/tiny_model.h"

namespace turbomind {
namespace {

using testing::Collect;
using testing::MakeRequest;
using testing::RandomPrompt;

constexpr uint64_t kCount = 500;

// Returns requests that begin like some others, with answers that repeat.
std::vector<std::shared_ptr<Request>> Requests() {
  std::mt19937 random(3);
  std::vector<std::shared_ptr<Request>> requests;
  for (uint64_t id = 0; id < kCount; ++id) {
    std::vector<int32_t> prompt = RandomPrompt(random() % 3, 120);
    prompt.resize(1 + random() % 120);
    for (auto n = random() % 40; n > 0; --n) {
      prompt.push_back(static_cast<int32_t>(random() % 5));
    }
    requests.push_back(MakeRequest(id, prompt, static_cast<int>(1 + random() % 60)));
    requests.back()->ignore_eos = true;
  }
  return requests;
}

std::unique_ptr<Engine> MakeEngine(const EngineConfig& config) {
  const ModelConfig model = testing::TinyHybrid();
  std::shared_ptr<Device> device = MakeCpuDevice(1);
  auto weights = testing::TinyWeights(model, *device);
  return std::make_unique<Engine>(model, config, std::move(weights), std::move(device),
                                  testing::kFreeBytes);
}

TEST_CASE("requests cancelled at random points change no answer and leave every state free") {
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kInt8);
  config.enable_prefix_caching = false;
  auto plain = MakeEngine(config);
  for (const auto& request : Requests()) {
    plain->Submit(request);
  }
  const auto wanted = Collect(*plain, kCount);

  config.enable_prefix_caching = true;
  config.cache_max_entry_count = 40;
  config.max_prefill_token_num = 64;
  config.num_draft_tokens = 4;
  config.state_checkpoint_share = 0.75;
  config.state_checkpoint_interval = 2;
  auto engine = MakeEngine(config);
  const int64_t num_checkpoints = engine->memory_plan().num_checkpoints;
  CHECK(num_checkpoints >= 5);
  CHECK(num_checkpoints < 40);
  std::thread client([&engine] {
    std::mt19937 random(5);
    for (const auto& request : Requests()) {
      engine->Submit(request);
      if (random() % 4 != 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
      }
      if (random() % 3 == 0) {
        engine->Cancel(request->id - random() % 8);  // may be unknown or finished
      }
    }
  });
  const auto outputs = Collect(*engine, kCount);
  client.join();
  REQUIRE(outputs.size() == kCount);
  std::map<FinishReason, int> reasons;
  for (const auto& [id, output] : outputs) {
    ++reasons[output.finish_reason];
    if (output.finish_reason == FinishReason::kLength) {
      CHECK(output.tokens == wanted.at(id).tokens);
    }
  }
  CHECK(reasons[FinishReason::kCancelled] > 0);
  CHECK(reasons[FinishReason::kLength] > 100);
  CHECK(reasons[FinishReason::kError] == 0);
  engine->CheckIntegrity();
  EngineStats stats = engine->stats();
  CHECK(stats.prefix_hit_tokens > 0);
  CHECK(stats.draft_tokens > 0);
  CHECK(stats.checkpoints_total == num_checkpoints);
  CHECK(stats.checkpoints_kept > 0);
  MESSAGE("checkpoints " << num_checkpoints << ", hits " << stats.prefix_hit_tokens << ", cut "
                         << stats.prefix_cut_tokens << ", drafted " << stats.draft_tokens
                         << ", preemptions " << stats.num_preemptions);
  engine->ClearPrefixCache();
  stats = engine->stats();
  CHECK(stats.blocks_free == stats.blocks_total);
  CHECK(stats.checkpoints_kept == 0);
  CHECK(engine->healthy());
}

}  // namespace
}  // namespace turbomind
