// Requests that are hard on the engine: they are cancelled at once, or their callback misbehaves or
// is slow to destroy.

#include <doctest/doctest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/tiny_model.h"
#include "sanitized_sample.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::Collect;
using testing::MakeRequest;
using testing::RunOne;
using testing::TinyEngine;
using testing::TinyEngineConfig;

std::unique_ptr<Engine> FastEngine() {
  EngineConfig config = TinyEngineConfig(KvCacheMode::kFp4Nv);
  config.check_integrity = false;
  return TinyEngine(config);
}

// A cancel could be lost between the engine's reading of new requests and of cancelled ones. The
// other requests prolong this moment. No later cancel follows, because it would hide the loss.
TEST_CASE("a cancel right after its request is never lost") {
  constexpr uint64_t kOthers = 500;
  auto engine = FastEngine();
  int num_lost = 0;
  for (int round = 0; round < (testing::kSanitized ? 20 : 200); ++round) {
    for (uint64_t id = 1; id <= kOthers; ++id) {
      engine->Submit(MakeRequest(id, {1}, 1));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(round % 10));
    engine->Submit(MakeRequest(0, {1, 2, 3}, 400));
    engine->Cancel(0);
    const auto outputs = Collect(*engine, kOthers + 1);
    REQUIRE(outputs.size() == kOthers + 1);
    num_lost += outputs.at(0).finish_reason != FinishReason::kCancelled ? 1 : 0;
  }
  CHECK(num_lost == 0);
}

// Destroying this callback needs a lock that a caller of the engine may hold, as with Python's
// lock.
TEST_CASE("a request is destroyed on the client's thread while no lock is held") {
  auto engine = FastEngine();
  std::vector<std::future<void>> callers;
  bool answered = false;
  std::thread::id destroyer;
  for (const bool cancel : {false, true}) {
    answered = false;
    {
      const std::shared_ptr<int> guard(new int(0), [&](const int* value) {
        delete value;
        destroyer = std::this_thread::get_id();
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
    CHECK(destroyer == std::this_thread::get_id());
  }
}

TEST_CASE("a mask of the wrong size ends only its own request") {
  auto engine = FastEngine();
  auto request = MakeRequest(1, {1, 2, 3}, 4);
  request->token_mask = [](const auto&, auto& mask) {
    mask.assign(1, 0xffffffffu);
    return true;
  };
  const RequestOutput output = RunOne(*engine, request);
  CHECK(output.finish_reason == FinishReason::kError);
  CHECK(output.error.find("returned 1 words, but must return 4") != std::string::npos);
  CHECK(RunOne(*engine, MakeRequest(2, {1, 2, 3}, 4)).tokens.size() == 4);
}

TEST_CASE("an unsupported head_dim is rejected before anything runs") {
  for (const int head_dim : {20, 72, 528, 1024}) {
    ModelConfig model = testing::TinyConfig();
    model.head_dim = head_dim;
    model.ropes[0].dim = head_dim;
    try {
      PlanMemory(model, TinyEngineConfig(KvCacheMode::kNone), testing::kFreeBytes,
                 DeviceCapability());
      FAIL("head_dim was accepted");
    } catch (const InvalidArgument& error) {
      CHECK(std::string(error.what()).find("head_dim " + std::to_string(head_dim)) == 0);
    }
  }
}

}  // namespace
}  // namespace turbomind
