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

// What is computed around the product of a call.
struct Kind {
  bool grouped = false;
  bool normed = false;
  bool gated = false;
  auto operator<=>(const Kind&) const = default;
};

// Calls by their kind and matrices, with the most rows of each.
using Calls = std::map<std::pair<Kind, std::vector<const PackedMatrix*>>, int>;

void CountCall(Calls& calls, Kind kind, std::span<const LinearPart> parts, int num_rows) {
  std::vector<const PackedMatrix*> matrices;
  for (const LinearPart& part : parts) {
    matrices.push_back(part.weight);
  }
  int& most = calls[{kind, matrices}];
  most = std::max(most, num_rows);
}

class CallRecorder final : public ForwardingDevice {
 public:
  CallRecorder() : ForwardingDevice(MakeCpuDevice(1)) {}
  void Linear(const LinearParams& p) override {
    Count({}, {p.parts, static_cast<size_t>(p.num_parts)}, p.num_rows);
    ForwardingDevice::Linear(p);
  }
  void Project(const ProjectParams& p) override {
    const LinearParams& linear = p.linear;
    Count({.normed = p.norm.x != nullptr, .gated = p.gate.out != nullptr && p.gate.gated},
          {linear.parts, static_cast<size_t>(linear.num_parts)}, linear.num_rows);
    is_part_ = true;
    ForwardingDevice::Project(p);
    is_part_ = false;
  }
  void GroupedLinear(const GroupedLinearParams& p) override {
    Count({.grouped = true}, {p.experts, static_cast<size_t>(p.num_experts)}, p.num_rows);
    ForwardingDevice::GroupedLinear(p);
  }
  void GroupedGate(const GroupedGateParams& p) override {
    const GroupedLinearParams& linear = p.linear;
    Count({.grouped = true, .gated = true},
          {linear.experts, static_cast<size_t>(linear.num_experts)}, linear.num_rows);
    is_part_ = true;
    ForwardingDevice::GroupedGate(p);
    is_part_ = false;
  }
  Calls calls;

 private:
  void Count(Kind kind, std::span<const LinearPart> parts, int num_rows) {
    if (!is_part_) {
      CountCall(calls, kind, parts, num_rows);
    }
  }
  bool is_part_ = false;  // of a call that is counted
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
      CountCall(layers, {layer.grouped, layer.normed, layer.gated}, layer.parts, layer.max_rows);
    }
    CHECK(layers.size() == device->calls.size());
    for (const auto& [call, num_rows] : device->calls) {
      const auto found = layers.find(call);
      REQUIRE(found != layers.end());
      CHECK(num_rows <= found->second);
    }
    CHECK(layers.at({{.normed = true}, {&weights->output_head()}}) ==
          std::min(kMaxRows, logit_rows));
  }
}

}  // namespace
}  // namespace turbomind
