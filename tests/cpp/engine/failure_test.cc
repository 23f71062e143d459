// If the engine itself fails, it ends all requests and reports the failure from then on.

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

TEST_CASE("a failed engine ends its requests and is not healthy") {
  const ModelConfig model = testing::TinyConfig();
  auto device = std::make_shared<testing::FailingDevice>(MakeCpuDevice(1), 5);
  Engine engine(model, testing::TinyEngineConfig(KvCacheMode::kNone),
                testing::TinyWeights(model, *device), device, testing::kFreeBytes);
  std::weak_ptr<int> held;
  for (uint64_t id : {1, 2}) {
    auto request = testing::MakeRequest(id, testing::RandomPrompt(1, 40), 50);
    const auto guard = std::make_shared<int>(0);
    held = guard;
    request->token_mask = [guard](const auto&, auto& mask) {
      std::fill(mask.begin(), mask.end(), ~0u);
      return true;
    };
    engine.Submit(std::move(request));
  }
  device->LetFail();
  auto outputs = testing::Collect(engine, 2);
  REQUIRE(outputs.size() == 2);
  for (const auto& [id, output] : outputs) {
    CHECK(output.finish_reason == FinishReason::kError);
    CHECK(output.error.find("the device is gone") != std::string::npos);
  }
  CHECK_FALSE(engine.healthy());
  CHECK(engine.stats().num_running == 0);
  CHECK(engine.stats().num_waiting == 0);
  CHECK(engine.failure().find("the device is gone") != std::string::npos);
  CHECK_THROWS_AS(engine.Submit(testing::MakeRequest(3, {1}, 1)), InternalError);
  CHECK_THROWS_AS(engine.CheckIntegrity(), InternalError);
  CHECK(held.expired());
  engine.Cancel(1);
  CHECK(engine.WaitOutputs(10'000).empty());  // returns at once
}

TEST_CASE("a task that runs while the engine stops leaves no request counted") {
  const ModelConfig model = testing::TinyConfig();
  auto device = std::make_shared<testing::WaitingDevice>(MakeCpuDevice(1));
  Engine engine(model, testing::TinyEngineConfig(KvCacheMode::kNone),
                testing::TinyWeights(model, *device), device, testing::kFreeBytes);
  for (uint64_t id : {1, 2, 3}) {
    engine.Submit(testing::MakeRequest(id, testing::RandomPrompt(1, 40), 400));
  }
  std::thread stops([&] { engine.Stop(); });
  std::thread clears([&] {
    try {
      engine.ClearPrefixCache();
    } catch (const InternalError&) {
      // The engine had already stopped.
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // both wait for the step
  device->LetStart();
  stops.join();
  clears.join();
  CHECK(engine.stats().num_running == 0);
  CHECK(engine.stats().num_waiting == 0);
}

}  // namespace
}  // namespace turbomind
