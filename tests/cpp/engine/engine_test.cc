#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <set>
#include <thread>
#include <utility>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/sampling.h"

namespace turbomind {
namespace {

using testing::Collect;
using testing::kVocab;
using testing::MakeRequest;
using testing::RandomPrompt;
using testing::RunOne;
using testing::TinyEngine;
using testing::TinyEngineConfig;

constexpr KvCacheMode kFormat = KvCacheMode::kFp4Nv;

std::unique_ptr<Engine> DefaultEngine() { return TinyEngine(TinyEngineConfig(kFormat)); }

TEST_CASE("EOS, stop sequences and limits end a request") {
  auto engine = DefaultEngine();
  const auto prompt = RandomPrompt(1, 30);
  const RequestOutput free_run = RunOne(*engine, MakeRequest(1, prompt, 12));
  CHECK(free_run.finish_reason == FinishReason::kLength);
  REQUIRE(free_run.tokens.size() == 12);
  const std::vector<int32_t>& tokens = free_run.tokens;

  auto request = MakeRequest(2, prompt, 12);
  request->stop_sequences = {{tokens[4], tokens[5]}, {tokens[3], tokens[4], tokens[5]}};
  RequestOutput output = RunOne(*engine, request);
  CHECK(output.finish_reason == FinishReason::kStop);
  CHECK(output.stop_tokens == 3);
  CHECK(output.tokens == std::vector<int32_t>(tokens.begin(), tokens.begin() + 6));

  request = MakeRequest(3, prompt, 12);
  request->eos_ids = {tokens[0]};
  output = RunOne(*engine, request);
  CHECK(output.finish_reason == FinishReason::kStop);
  CHECK(output.stop_tokens == 1);
  CHECK(output.tokens.size() == 1);

  request = MakeRequest(4, prompt, 12);
  request->eos_ids = {tokens[0]};
  request->ignore_eos = true;
  CHECK(RunOne(*engine, request).tokens == tokens);

  request = MakeRequest(5, prompt, 12);
  request->eos_ids = {tokens[0]};
  request->min_new_tokens = 5;
  output = RunOne(*engine, request);
  CHECK(output.tokens.size() >= 5);
  CHECK(std::count(output.tokens.begin(), output.tokens.begin() + 5, tokens[0]) == 0);

  request = MakeRequest(6, prompt, 12);
  request->bad_sequences = {{tokens[0], tokens[1]}};
  output = RunOne(*engine, request);
  CHECK(output.tokens[0] == tokens[0]);
  CHECK(output.tokens[1] != tokens[1]);
}

TEST_CASE("requests share cached prefixes only if their salts are equal") {
  auto engine = DefaultEngine();
  const auto prompt = RandomPrompt(1, 200);
  uint64_t id = 0;
  const auto run = [&](const CacheSalt& salt) {
    auto request = MakeRequest(++id, prompt, 4);
    request->cache_salt = salt;
    return RunOne(*engine, request);
  };
  const RequestOutput first = run({});
  CHECK(first.cached_tokens == 0);
  CHECK(run({}).cached_tokens > 0);
  for (const CacheSalt& salt : {CacheSalt{1, 0}, CacheSalt{0, 1}}) {
    CHECK(run(salt).cached_tokens == 0);
    const RequestOutput second = run(salt);
    CHECK(second.cached_tokens > 0);
    CHECK(second.tokens == first.tokens);
  }
}

TEST_CASE("a sequence ends at session_len") {
  EngineConfig config = TinyEngineConfig(kFormat);
  config.session_len = 40;
  auto engine = TinyEngine(config);
  const RequestOutput output = RunOne(*engine, MakeRequest(1, RandomPrompt(1, 30), 100));
  CHECK(output.finish_reason == FinishReason::kLength);
  CHECK(output.tokens.size() == 10);
}

TEST_CASE("a request gets the log-probabilities and logits of its prompt and response") {
  EngineConfig config = TinyEngineConfig(kFormat);
  config.max_prefill_token_num = 16;
  auto engine = TinyEngine(config);
  const auto prompt = RandomPrompt(3, 50);
  for (uint64_t id : {1, 2}) {  // the second must not hit the prefix cache
    auto request = MakeRequest(id, prompt, 3);
    request->num_prompt_logprobs = 2;
    request->sampling.num_logprobs = 4;
    request->logits_output = LogitsOutput::kAll;
    const RequestOutput output = RunOne(*engine, request);
    REQUIRE(output.prompt_logprobs.size() == 49);
    CHECK(output.prompt_logprobs[0].top.size() == 2);
    REQUIRE(output.logprobs.size() == 3);
    CHECK(output.logprobs[0].top.size() == 4);
    CHECK(output.logprobs[0].chosen == output.logprobs[0].top[0].second);
    CHECK(output.cached_tokens == 0);
    REQUIRE(output.logits_rows == 52);
    CHECK(output.logits.size() == static_cast<size_t>(52 * kVocab));
    const float* last = output.logits.data() + 49 * kVocab;
    CHECK(std::max_element(last, last + kVocab) - last == output.tokens[0]);
    const TokenLogprobs expected =
        ComputeLogprobs(output.logits.data() + 10 * kVocab, kVocab, prompt[11], 2);
    CHECK(output.prompt_logprobs[10].chosen == expected.chosen);
  }
  auto request = MakeRequest(3, prompt, 0);
  request->num_prompt_logprobs = 0;
  const RequestOutput output = RunOne(*engine, request);
  CHECK(output.prompt_logprobs.size() == 49);
  CHECK(output.tokens.empty());
  CHECK(output.finish_reason == FinishReason::kLength);
}

TEST_CASE("pooled vectors do not depend on the prefix cache, and only the last state uses it") {
  auto engine = DefaultEngine();
  const auto prompt = RandomPrompt(3, 200);
  const auto run = [&](uint64_t id, Pooling pooling) {
    auto request = MakeRequest(id, prompt, 0);
    request->pooling = pooling;
    return RunOne(*engine, request);
  };
  const RequestOutput last = run(1, Pooling::kLast);
  const RequestOutput mean = run(2, Pooling::kMean);
  const RequestOutput again = run(3, Pooling::kLast);
  CHECK(run(4, Pooling::kMean).pooled == mean.pooled);
  CHECK(again.pooled == last.pooled);
  CHECK(again.cached_tokens > 0);
  CHECK(mean.cached_tokens == 0);
  CHECK(mean.pooled != last.pooled);
}

TEST_CASE("a pooled request with new tokens, log-probabilities or logits is refused") {
  auto engine = DefaultEngine();
  for (int wrong = 0; wrong < 3; ++wrong) {
    auto request = MakeRequest(1, RandomPrompt(1, 20), wrong == 0 ? 1 : 0);
    request->pooling = Pooling::kLast;
    request->num_prompt_logprobs = wrong == 1 ? 0 : -1;
    request->logits_output = wrong == 2 ? LogitsOutput::kAll : LogitsOutput::kNone;
    CHECK_THROWS_AS(engine->Submit(request), InvalidArgument);
  }
}

TEST_CASE("a failing token mask ends only its own request") {
  auto engine = DefaultEngine();
  auto broken = MakeRequest(1, RandomPrompt(1, 20), 20);
  broken->token_mask = [calls = 0](const auto&, auto& mask) mutable {
    if (++calls == 3) {
      throw std::runtime_error("no such rule");
    }
    mask.assign(mask.size(), 0xffffffffu);
    return true;
  };
  auto only_five = MakeRequest(2, RandomPrompt(2, 20), 20);
  std::vector<int32_t> told;
  only_five->token_mask = [&told](const std::vector<int32_t>& fresh, auto& mask) {
    told.insert(told.end(), fresh.begin(), fresh.end());
    mask[0] = 1u << 5;
    return told.size() < 4;
  };
  auto nothing = MakeRequest(3, RandomPrompt(3, 20), 20);
  nothing->token_mask = [](const auto&, auto&) { return true; };
  auto wrong = MakeRequest(5, RandomPrompt(5, 20), 20);
  wrong->sampling.top_p = 2.f;
  engine->Submit(wrong);
  engine->Submit(broken);
  engine->Submit(only_five);
  engine->Submit(nothing);
  engine->Submit(MakeRequest(4, RandomPrompt(4, 20), 20));
  auto outputs = Collect(*engine, 5);
  CHECK(outputs[1].finish_reason == FinishReason::kError);
  CHECK(outputs[1].error == "token_mask: no such rule");
  CHECK_FALSE(outputs[1].is_request_fault);
  CHECK(outputs[1].tokens.size() == 2);
  CHECK(outputs[2].finish_reason == FinishReason::kStop);
  CHECK(outputs[2].tokens == std::vector<int32_t>(4, 5));
  CHECK(outputs[3].finish_reason == FinishReason::kError);
  CHECK(outputs[3].is_request_fault);
  CHECK(outputs[3].error_field.empty());
  CHECK(outputs[5].is_request_fault);
  CHECK(outputs[5].error_field == "top_p");
  CHECK(outputs[4].finish_reason == FinishReason::kLength);
  CHECK(engine->healthy());
  engine->ClearPrefixCache();
  CHECK(engine->stats().blocks_free == engine->stats().blocks_total);
}

// Puts a NaN and a value that FP4 clips into the first V row. Computes argmax itself, so that the
// engine reads no logits for it.
class NanDevice : public testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  void WriteKv(const WriteKvParams& params) override {
    if (!std::exchange(is_done_, true)) {
      float* v = params.qkv + (params.q_heads + params.kv.kv_heads) * params.kv.head_dim;
      v[0] = NAN;
      v[1] = -30000.f;
    }
    ForwardingDevice::WriteKv(params);
  }
  bool ArgMaxRows(const ArgMaxRowsParams& params) override {
    for (int row = 0; row < params.num_rows; ++row) {
      const float* logits = params.logits + int64_t{row} * params.vocab_size;
      params.ids[row] =
          static_cast<int32_t>(std::max_element(logits, logits + params.vocab_size) - logits);
    }
    return true;
  }

 private:
  bool is_done_ = false;
};

TEST_CASE("NaN and clipped values in K and V are counted whether tokens or logits are read") {
  const ModelConfig model = testing::TinyConfig();
  for (const int num_logprobs : {-1, 2}) {
    CAPTURE(num_logprobs);
    auto device = std::make_shared<NanDevice>(MakeCpuDevice(1));
    Engine engine(model, TinyEngineConfig(kFormat), testing::TinyWeights(model, *device), device,
                  testing::kFreeBytes);
    auto request = MakeRequest(1, RandomPrompt(1, 40), 3);
    request->sampling.num_logprobs = num_logprobs;
    CHECK(RunOne(engine, request).finish_reason == FinishReason::kLength);
    CHECK(engine.stats().num_nonfinite == 1);
    const std::vector<EngineStats::Clipped> clipped = engine.stats().clipped;
    REQUIRE(clipped.size() == 2);
    for (const EngineStats::Clipped& group : clipped) {
      CHECK(group.num_values == (group.window == model.windows.front() ? 1 : 0));
    }
  }
}

TEST_CASE("requests that can never run are rejected with the numbers") {
  EngineConfig config = TinyEngineConfig(kFormat);
  config.cache_max_entry_count = 8;  // 128 tokens
  auto engine = TinyEngine(config);
  const auto text = [&](const std::shared_ptr<Request>& request) {
    try {
      engine->Submit(request);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(text(MakeRequest(1, {}, 1)).find("at least one") != std::string::npos);
  CHECK(text(MakeRequest(1, RandomPrompt(1, 512), 1)).find("session_len is 512") !=
        std::string::npos);
  CHECK(text(MakeRequest(1, RandomPrompt(1, 300), 1)).find("128") != std::string::npos);
  CHECK(text(MakeRequest(1, {kVocab}, 1)).find("token id 97") != std::string::npos);
  CHECK(text(MakeRequest(1, {-1}, 1)).find("token id -1") != std::string::npos);
  CHECK(text(MakeRequest(1, {1}, -1)).find("max_new_tokens") != std::string::npos);
  auto empty_stop = MakeRequest(1, {1}, 1);
  empty_stop->stop_sequences = {{}};
  CHECK(text(empty_stop).find("stop_sequences") != std::string::npos);
  const RequestOutput output = RunOne(*engine, MakeRequest(1, RandomPrompt(1, 100), 400));
  CHECK(output.finish_reason == FinishReason::kLength);  // the pool is full
  CHECK(output.tokens.size() == 28);
}

TEST_CASE("an id in use is rejected until its request's last output") {
  auto engine = DefaultEngine();
  engine->Submit(MakeRequest(1, RandomPrompt(1, 100), 300));
  CHECK_THROWS_AS(engine->Submit(MakeRequest(1, {1}, 1)), InvalidArgument);
  engine->Cancel(1);
  CHECK(Collect(*engine, 1)[1].finish_reason == FinishReason::kCancelled);
  CHECK(RunOne(*engine, MakeRequest(1, {1}, 1)).tokens.size() == 1);
  engine->Cancel(1);   // finished
  engine->Cancel(77);  // unknown
}

TEST_CASE("500 requests cancelled at random points leave every block free") {
  EngineConfig config = TinyEngineConfig(kFormat);
  config.cache_max_entry_count = 40;
  config.max_prefill_token_num = 64;
  auto engine = TinyEngine(config);
  constexpr uint64_t kCount = 500;
  std::thread client([&engine] {
    std::mt19937 random(5);
    for (uint64_t id = 0; id < kCount; ++id) {
      const auto length = static_cast<int>(1 + random() % 200);
      engine->Submit(MakeRequest(id, RandomPrompt(static_cast<uint32_t>(random() % 20), length),
                                 static_cast<int>(1 + random() % 60)));
      if (random() % 4 != 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
      }
      engine->Cancel(id - random() % 8);  // may be unknown or finished
      engine->Cancel(id);
    }
  });
  const auto outputs = Collect(*engine, kCount);
  client.join();
  CHECK(outputs.size() == kCount);
  std::map<FinishReason, int> reasons;
  for (const auto& [id, output] : outputs) {
    ++reasons[output.finish_reason];
  }
  CHECK(reasons[FinishReason::kCancelled] > 0);
  CHECK(reasons[FinishReason::kError] == 0);
  engine->CheckIntegrity();
  engine->ClearPrefixCache();
  const EngineStats stats = engine->stats();
  CHECK(stats.blocks_free == stats.blocks_total);
  CHECK(stats.num_running == 0);
  CHECK(stats.num_waiting == 0);
  CHECK(engine->healthy());
}

TEST_CASE("a request is counted from its submission on, including its first step") {
  const ModelConfig model = testing::TinyConfig();
  auto device = std::make_shared<testing::WaitingDevice>(MakeCpuDevice(1));
  Engine engine(model, TinyEngineConfig(kFormat), testing::TinyWeights(model, *device), device,
                testing::kFreeBytes);
  engine.Submit(MakeRequest(1, RandomPrompt(1, 40), 2));
  bool was_lost = false;
  EngineStats stats = engine.stats();
  for (int i = 0; i < 10'000 && stats.num_running == 0; ++i) {
    was_lost = was_lost || stats.num_waiting + stats.num_running != 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    stats = engine.stats();
  }
  CHECK_FALSE(was_lost);
  CHECK(stats.num_running == 1);  // while Embed waits
  CHECK(stats.num_waiting == 0);
  CHECK(stats.blocks_active > 0);
  CHECK(stats.prompt_tokens == 40);
  device->LetStart();
  CHECK(Collect(engine, 1).size() == 1);
}

TEST_CASE("prompts that never ran are not counted as processed") {
  const ModelConfig model = testing::TinyConfig();
  auto device = std::make_shared<testing::WaitingDevice>(MakeCpuDevice(1));
  EngineConfig config = TinyEngineConfig(kFormat);
  config.max_batch_size = 1;
  Engine engine(model, config, testing::TinyWeights(model, *device), device, testing::kFreeBytes);
  engine.Submit(MakeRequest(1, RandomPrompt(1, 40), 2));
  engine.Submit(MakeRequest(2, RandomPrompt(2, 30), 2));
  engine.Cancel(2);
  device->LetStart();
  CHECK(Collect(engine, 2).size() == 2);
  engine.CheckIntegrity();  // runs between steps, after the counts are published
  CHECK(engine.stats().prompt_tokens == 40);
}

TEST_CASE("Stop ends all requests, and later requests are rejected") {
  auto engine = DefaultEngine();
  for (uint64_t id = 0; id < 20; ++id) {
    engine->Submit(MakeRequest(id, RandomPrompt(static_cast<uint32_t>(id), 100), 400));
  }
  CHECK(engine->WaitOutputs(10'000).size() > 0);
  engine->Stop();
  engine->Stop();
  std::set<uint64_t> ended;
  for (const RequestOutput& output : engine->WaitOutputs(0)) {
    if (output.finish_reason == FinishReason::kCancelled) {
      ended.insert(output.request_id);
    }
  }
  CHECK(ended.size() == 20);
  CHECK(engine->healthy());
  CHECK_THROWS_AS(engine->Submit(MakeRequest(30, {1}, 1)), InternalError);
  CHECK_THROWS_AS(engine->ClearPrefixCache(), InternalError);
  CHECK(engine->WaitOutputs(10'000).empty());  // returns at once
}

// Counts the bytes that are reserved and not yet released.
class ReservingDevice : public testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void* Reserve(size_t num_bytes) override {
    reserved += num_bytes;
    return ForwardingDevice::Reserve(num_bytes);
  }
  void Release(void* memory, size_t num_bytes) override {
    reserved -= num_bytes;
    ForwardingDevice::Release(memory, num_bytes);
  }
  std::atomic<size_t> reserved = 0;
};

TEST_CASE("Stop frees the model and the cache and keeps the statistics") {
  const ModelConfig model = testing::TinyConfig();
  const EngineConfig config = TinyEngineConfig(kFormat);
  auto device = std::make_shared<ReservingDevice>(MakeCpuDevice(1));
  std::shared_ptr<const Weights> weights = testing::TinyWeights(model, *device);
  const std::weak_ptr<const Weights> model_weights = weights;
  Engine engine(model, config, std::move(weights), device, testing::kFreeBytes);
  RunOne(engine, MakeRequest(1, RandomPrompt(1, 100), 4));
  CHECK(!model_weights.expired());
  CHECK(device->reserved >= static_cast<size_t>(engine.memory_plan().reserved_bytes));
  engine.Stop();
  CHECK(model_weights.expired());
  CHECK(device->reserved == 0);
  CHECK(device.use_count() == 1);
  CHECK(engine.stats().prompt_tokens == 100);
  CHECK(engine.memory_plan().touched_bytes > 0);
}

TEST_CASE("the pools match the memory plan, which rejects what does not fit") {
  const ModelConfig model = testing::TinyConfig();
  EngineConfig config = TinyEngineConfig(kFormat);
  const MemoryPlan plan = PlanMemory(model, config, testing::kFreeBytes, DeviceCapability());
  auto engine = TinyEngine(config);
  CHECK(engine->memory_plan().reserved_bytes == plan.reserved_bytes);
  CHECK(engine->memory_plan().num_blocks == plan.num_blocks);
  CHECK(engine->memory_plan().touched_bytes == 0);
  // There are two layers, two heads, K and V. A row of 64 values takes 36 bytes.
  CHECK(plan.bytes_per_token == 2 * 2 * 2 * 36);
  CHECK(plan.bytes_per_token_none == 2 * 2 * 2 * 128);
  CHECK(plan.num_blocks <= 8 * (512 / 16) + 8);
  RunOne(*engine, MakeRequest(1, RandomPrompt(1, 100), 4));
  CHECK(engine->memory_plan().touched_bytes > 0);
  CHECK(engine->memory_plan().touched_bytes < plan.reserved_bytes);
  CHECK_THROWS_AS(PlanMemory(model, config, 1000, DeviceCapability()), InvalidArgument);
  for (int bad : {0, -1}) {
    for (int EngineConfig::*field :
         {&EngineConfig::max_batch_size, &EngineConfig::session_len,
          &EngineConfig::max_prefill_token_num, &EngineConfig::cache_block_seq_len}) {
      EngineConfig wrong = config;
      wrong.*field = bad;
      CHECK_THROWS_AS(PlanMemory(model, wrong, testing::kFreeBytes, DeviceCapability()),
                      InvalidArgument);
    }
  }
  EngineConfig long_blocks = config;
  long_blocks.cache_block_seq_len = 256;  // only contiguous caches have such blocks
  CHECK_THROWS_AS(PlanMemory(model, long_blocks, testing::kFreeBytes, DeviceCapability()),
                  InvalidArgument);
  for (double bad : {0.0, -1.0, 1.5, std::nan("")}) {
    config.cache_max_entry_count = bad;
    CHECK_THROWS_AS(PlanMemory(model, config, testing::kFreeBytes, DeviceCapability()),
                    InvalidArgument);
  }
}

}  // namespace
}  // namespace turbomind
