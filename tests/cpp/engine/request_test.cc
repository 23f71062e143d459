// What a request may do to the engine that runs it: be cancelled at once, bring a callback that
// misbehaves or is slow to go.

#include <doctest/doctest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/tiny_model.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::Collect;
using testing::MakeRequest;
using testing::RandomPrompt;
using testing::RunOne;
using testing::TinyEngine;
using testing::TinyEngineConfig;

std::unique_ptr<Engine> FastEngine() {
  EngineConfig config = TinyEngineConfig(KvCacheMode::kFp4Nv);
  config.check_integrity = false;
  return TinyEngine(config);
}

// The moment that matters lies between the engine's look at new requests and at cancelled ones: a
// prompt that is long to copy makes it last. It is cancelled itself, so that it never runs.
TEST_CASE("a cancel right behind its request is never lost") {
  constexpr int kLength = 1 << 20;
  ModelConfig model = testing::TinyConfig();
  model.windows = {40, 40};  // a sequence of any length fits
  EngineConfig config = TinyEngineConfig(KvCacheMode::kFp4Nv);
  config.session_len = kLength + 1;
  config.max_prefill_token_num = 64;
  std::shared_ptr<Device> device = MakeCpuDevice(1);
  Engine engine(model, config, testing::TinyWeights(model, *device), device, testing::kFreeBytes);
  const std::vector<int32_t> prompt = RandomPrompt(1, kLength);
  int num_lost = 0;
  for (int round = 0; round < 20; ++round) {
    auto first = MakeRequest(1, prompt, 1);
    first->cancelled = true;
    engine.Submit(std::move(first));
    engine.Cancel(1);
    std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
    engine.Submit(MakeRequest(2, {1, 2, 3}, 400));
    engine.Cancel(2);
    const auto outputs = Collect(engine, 2);
    REQUIRE(outputs.size() == 2);
    CHECK(outputs.at(1).finish_reason == FinishReason::kCancelled);
    num_lost += outputs.at(2).finish_reason != FinishReason::kCancelled;
  }
  CHECK(num_lost == 0);
}

// A callback whose end needs a lock that a caller of the engine may hold, as Python's does.
TEST_CASE("the last reference to a request goes while no lock of the engine is held") {
  auto engine = FastEngine();
  std::vector<std::future<void>> callers;
  bool answered = false;
  for (const bool cancel : {false, true}) {
    answered = false;
    {
      const std::shared_ptr<int> guard(new int(0), [&](const int* value) {
        delete value;
        callers.push_back(std::async(std::launch::async, [&] { engine->healthy(); }));
        answered = callers.back().wait_for(std::chrono::seconds(5)) == std::future_status::ready;
      });
      auto request = MakeRequest(1, {1, 2, 3}, cancel ? 400 : 2);
      request->token_mask = [guard](const auto&, auto& mask) {
        mask.assign(mask.size(), 0xffffffffu);
        return true;
      };
      engine->Submit(std::move(request));
      if (cancel) {
        engine->Cancel(1);
      }
    }
    Collect(*engine, 1);
    RunOne(*engine, MakeRequest(2, {1}, 1));  // the step that ended the first is over
    CHECK(answered);
  }
}

TEST_CASE("a mask of another size ends its request alone") {
  auto engine = FastEngine();
  auto request = MakeRequest(1, {1, 2, 3}, 4);
  request->token_mask = [](const auto&, auto& mask) {
    mask.assign(1, 0xffffffffu);
    return true;
  };
  const RequestOutput output = RunOne(*engine, request);
  CHECK(output.finish_reason == FinishReason::kError);
  CHECK(output.error.find("got 1 words, want 4") != std::string::npos);
  CHECK(RunOne(*engine, MakeRequest(2, {1, 2, 3}, 4)).tokens.size() == 4);
}

TEST_CASE("a head that attention cannot compute is refused before anything runs") {
  for (const int head_dim : {20, 72, 272, 512}) {
    ModelConfig model = testing::TinyConfig();
    model.head_dim = head_dim;
    model.rope.dim = head_dim;
    try {
      PlanMemory(model, TinyEngineConfig(KvCacheMode::kNone), testing::kFreeBytes, true);
      FAIL("head_dim was taken");
    } catch (const InvalidArgument& error) {
      CHECK(std::string(error.what()).find("head_dim: got " + std::to_string(head_dim)) == 0);
    }
  }
}

}  // namespace
}  // namespace turbomind
