// Compares the layers that a device tunes with the calls that an engine makes.

#include "turbomind/model/layers_to_tune.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/tiny_model.h"
#include "turbomind/ops/forwarding_device.h"

namespace turbomind {
namespace {

constexpr int kMaxRows = 64;

// Calls by their kind and matrices, with the most rows of each.
using Calls = std::map<std::pair<bool, std::vector<const PackedMatrix*>>, int>;

void CountCall(Calls& calls, bool is_grouped, std::span<const LinearPart> parts, int num_rows) {
  std::vector<const PackedMatrix*> matrices;
  for (const LinearPart& part : parts) {
    matrices.push_back(part.weight);
  }
  int& most = calls[{is_grouped, matrices}];
  most = std::max(most, num_rows);
}

class CallRecorder final : public ForwardingDevice {
 public:
  CallRecorder() : ForwardingDevice(MakeCpuDevice(1)) {}
  void Linear(const LinearParams& p) override {
    CountCall(calls, false, {p.parts, static_cast<size_t>(p.num_parts)}, p.num_rows);
    ForwardingDevice::Linear(p);
  }
  void GroupedLinear(const GroupedLinearParams& p) override {
    CountCall(calls, true, {p.experts, static_cast<size_t>(p.num_experts)}, p.num_rows);
    ForwardingDevice::GroupedLinear(p);
  }
  Calls calls;
};

TEST_CASE("the layers to tune are the calls of an engine") {
  for (const ModelConfig& model :
       {testing::TinyConfig(), testing::TinyGptOss(), testing::TinyQwenMoe(),
        testing::TinyParallel(), testing::TinySigmoidMoe(), testing::TinyHybrid()}) {
    const auto device = std::make_shared<CallRecorder>();
    const auto weights = testing::TinyWeights(model, *device);
    EngineConfig config = testing::TinyEngineConfig(KvCacheMode::kNone);
    config.max_prefill_token_num = kMaxRows;
    {
      Engine engine(model, config, weights, device, testing::kFreeBytes);
      testing::RunOne(engine, testing::MakeRequest(1, testing::RandomPrompt(1, 100), 3));
    }
    const int logit_rows = device->capability().max_logit_rows;
    Calls layers;
    for (const LayerToTune& layer : LayersToTune(*weights, kMaxRows, logit_rows)) {
      CountCall(layers, layer.grouped, layer.parts, layer.max_rows);
    }
    CHECK(layers.size() == device->calls.size());
    for (const auto& [call, num_rows] : device->calls) {
      const auto found = layers.find(call);
      REQUIRE(found != layers.end());
      CHECK(num_rows <= found->second);
    }
    CHECK(layers.at({false, {&weights->output_head()}}) == std::min(kMaxRows, logit_rows));
  }
}

}  // namespace
}  // namespace turbomind
