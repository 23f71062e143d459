// Counts the launches of a decode step's layers. Only the stand-in for a GPU counts them: its clock
// is the number of launches.

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/runtime/event_timer.h"
#include "turbomind/engine/memory_plan.h"
#include "turbomind/model/layers_to_tune.h"

namespace turbomind {
namespace {

// Counts the launches of the ops of each step, and forwards fused calls as they are.
class LaunchCounter final : public testing::ForwardingDevice {
 public:
  LaunchCounter()
      : ForwardingDevice(cuda::MakeDevice(0, {})), stream_(cuda::CreateStream()), timer_(stream_) {}
  ~LaunchCounter() override { cuda::DestroyStream(stream_); }

  void RunStep(const StepParams& step, FunctionRef<void()> ops) override {
    const double count = timer_.Time([&] { ForwardingDevice::RunStep(step, ops); });
    if (step.groups[0].batch.num_decode == step.groups[0].batch.num_seqs) {
      launches.push_back(static_cast<int>(count));
    }
  }
  void Project(const ProjectParams& params) override { inner().Project(params); }
  void GroupedGate(const GroupedGateParams& params) override { inner().GroupedGate(params); }
  void AssignExperts(const AssignExpertsParams& params) override { inner().AssignExperts(params); }

  std::vector<int> launches;  // by decode step

 private:
  cuda::Stream stream_;
  cuda::EventTimer timer_;
};

// Return the launches of a decode step of one sequence. If `tuned` is not null, the device is
// tuned; what that measured before is used, and what it measures is added.
int CountStep(const ModelConfig& model, EngineConfig config, std::vector<TunedChoice>* tuned) {
  const auto device = std::make_shared<LaunchCounter>();
  config.check_integrity = false;
  config.max_batch_size = 1;
  auto weights = testing::TinyWeights(model, *device, {.quantized = true, .alternates = false});
  if (tuned != nullptr) {
    *tuned = device
                 ->Tune({.layers = LayersToTune(*weights, 1, 1),
                         .attention = AttentionToTuneOf(model, config),
                         .saved = *tuned,
                         .max_seconds = 1e9})
                 .choices;
  }
  Engine engine(model, config, std::move(weights), device, int64_t{1} << 30);
  auto request = testing::MakeRequest(1, testing::RandomPrompt(0, 20), 4);
  request->ignore_eos = true;
  engine.Submit(request);
  testing::Collect(engine, 1);
  engine.Stop();
  REQUIRE(!device->launches.empty());
  return *std::ranges::min_element(device->launches);
}

// Return the launches of each layer, from models of two and three equal layers.
int CountPerLayer(ModelConfig model, const EngineConfig& config, std::vector<TunedChoice>* tuned) {
  const auto count = [&](int num_layers) {
    model.num_layers = num_layers;
    model.windows.assign(static_cast<size_t>(num_layers), 0);
    if (model.moe.num_experts > 0) {
      model.moe.layers.assign(static_cast<size_t>(num_layers), 1);
    }
    return CountStep(model, config, tuned);
  };
  const int of_two = count(2);
  return count(3) - of_two;
}

bool CountsLaunches() { return cuda::PropertiesOf(0).name == "shim"; }

TEST_CASE("a dense layer takes at most 6 launches, and 7 with a 16-bit window") {
  if (!CountsLaunches()) {
    return;
  }
  std::vector<TunedChoice> tuned;
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Nv);
  CHECK(CountPerLayer(testing::TinyConfig(), config, nullptr) == 10);
  CHECK(CountPerLayer(testing::TinyConfig(), config, &tuned) == 6);
  config.kv_quality.window16 = {64, 64};
  config.cache_block_seq_len = 64;
  CHECK(CountPerLayer(testing::TinyConfig(), config, nullptr) == 11);
  CHECK(CountPerLayer(testing::TinyConfig(), config, &tuned) == 7);
}

TEST_CASE("a layer with heads of 512 values takes as many launches as one with smaller heads") {
  if (!CountsLaunches()) {
    return;
  }
  ModelConfig model = testing::TinyConfig();
  model.head_dim = 512;
  model.ropes[0].dim = 512;
  std::vector<TunedChoice> tuned;
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Nv);
  CHECK(CountPerLayer(model, config, nullptr) == 10);
  CHECK(CountPerLayer(model, config, &tuned) == 6);
  config.kv_quality.window16 = {64, 64};
  config.cache_block_seq_len = 64;
  CHECK(CountPerLayer(model, config, nullptr) == 11);
}

TEST_CASE("a layer of experts takes at most 9 launches, and 10 with a 16-bit window") {
  if (!CountsLaunches()) {
    return;
  }
  std::vector<TunedChoice> tuned;
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Mx);
  CHECK(CountPerLayer(testing::TinyGptOss(), config, nullptr) == 13);
  CHECK(CountPerLayer(testing::TinyGptOss(), config, &tuned) == 9);
  config.kv_quality.window16 = {64, 64};
  config.cache_block_seq_len = 64;
  CHECK(CountPerLayer(testing::TinyGptOss(), config, nullptr) == 14);
  CHECK(CountPerLayer(testing::TinyGptOss(), config, &tuned) == 10);
}

TEST_CASE("a rotation of latents takes a launch when decoding") {
  if (!CountsLaunches()) {
    return;
  }
  EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kFp4Nv);
  ModelConfig model = testing::TinyDeepSeek();
  model.moe = {};
  const int plain = CountPerLayer(model, config, nullptr);
  config.kv_quality.rotate_k = true;
  CHECK(CountPerLayer(model, config, nullptr) == plain + 1);
}

}  // namespace
}  // namespace turbomind
