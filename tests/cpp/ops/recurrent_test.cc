#include "turbomind/ops/recurrent.h"

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "engine/ops_refusing_device.h"
#include "ops/recurrent_fixture.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

// Counts the calls that pass the checks.
class CountingDevice : public OpsRefusingDevice {
 public:
  std::string name() const override { return "counting"; }
  void* Reserve(size_t) override { return nullptr; }
  void Release(void*, size_t) override {}
  void ShortConvolution(const ShortConvolutionParams&) override { ++calls; }
  void GatedDelta(const GatedDeltaParams&) override { ++calls; }

  int calls = 0;
};

// Arguments that pass the checks. No value is read.
struct Arguments {
  Arguments() : step({{0, 1, {{1, 0}}}, {1, 3, {{1, 1}, {3, 2}}}}, {5, 0}, {1, 0}) {
    auto* floats = reinterpret_cast<float*>(bytes.data());
    auto* other = floats + 1024;
    const StateView pool = {bytes.data(), 1 << 14};
    convolution = {.x = floats,
                   .x_stride = 20,
                   .weight = floats,
                   .bias = floats,
                   .out = other,
                   .channels = 16,
                   .kernel = 4,
                   .state = {pool, pool},
                   .states = step.states(),
                   .batch = step.batch()};
    delta = {.q = floats,
             .k = floats,
             .v = floats,
             .qkv_stride = 64,
             .b = floats,
             .a = floats,
             .gate_stride = 2,
             .decay = floats,
             .dt_bias = floats,
             .out = other,
             .key_heads = 1,
             .value_heads = 2,
             .key_dim = 64,
             .value_dim = 32,
             .state = {pool, pool},
             .states = step.states(),
             .batch = step.batch()};
  }

  alignas(64) std::array<std::byte, 1 << 14> bytes = {};
  RecurrentStep step;
  ShortConvolutionParams convolution;
  GatedDeltaParams delta;
  CountingDevice device;
};

void CheckRefused(const std::string& text, const std::function<void(Arguments&)>& change,
                  bool of_convolution, bool of_delta) {
  Arguments arguments;
  CAPTURE(text);
  change(arguments);
  if (of_convolution) {
    CHECK_THROWS_WITH_AS(invokeShortConvolution(arguments.device, arguments.convolution),
                         doctest::Contains(text.c_str()), InternalError);
  }
  if (of_delta) {
    CHECK_THROWS_WITH_AS(invokeGatedDelta(arguments.device, arguments.delta),
                         doctest::Contains(text.c_str()), InternalError);
  }
  CHECK(arguments.device.calls == 0);
}

}  // namespace

TEST_CASE("correct arguments of recurrent layers reach the device") {
  Arguments arguments;
  invokeShortConvolution(arguments.device, arguments.convolution);
  invokeGatedDelta(arguments.device, arguments.delta);
  arguments.delta.states.num_saves = 0;
  arguments.delta.states.saves = nullptr;
  arguments.delta.state.checkpoints = {};
  invokeGatedDelta(arguments.device, arguments.delta);
  CHECK(arguments.device.calls == 3);
}

TEST_CASE("slots and saves that cannot be are refused") {
  const auto both = [](const std::string& text, const std::function<void(RecurrentStep&)>& change) {
    CheckRefused(
        text, [&](Arguments& a) { change(a.step); }, true, true);
  };
  both("every sequence must have a slot", [](RecurrentStep& s) { s.slots[1] = -1; });
  both("must name a sequence", [](RecurrentStep& s) { s.saves[2].sequence = 2; });
  both("must name a sequence", [](RecurrentStep& s) { s.saves[0].sequence = -1; });
  both("must name a sequence", [](RecurrentStep& s) { s.saves[1].checkpoint = -1; });
  both("must follow a new token", [](RecurrentStep& s) { s.saves[0].num_tokens = 0; });
  both("must follow a new token", [](RecurrentStep& s) { s.saves[2].num_tokens = 4; });
  both("saves must ascend", [](RecurrentStep& s) { s.saves[2].num_tokens = 1; });
  both("saves must ascend", [](RecurrentStep& s) { std::swap(s.saves[0], s.saves[1]); });
  both("positions must match", [](RecurrentStep& s) { s.positions[1] = 1; });
}

TEST_CASE("shapes that the kernels do not have are refused") {
  const auto convolution = [](const std::string& text, const auto& change) {
    CheckRefused(
        text, [&](Arguments& a) { change(a.convolution); }, true, false);
  };
  using Convolution = ShortConvolutionParams;
  for (const int channels : {0, -16, 8}) {
    convolution("channels must be", [&](Convolution& p) { p.channels = channels; });
  }
  convolution("x_stride must be", [](Convolution& p) { p.x_stride = 15; });
  for (const int kernel : {-1, 0, 1, 9}) {
    convolution("kernel must be", [&](Convolution& p) { p.kernel = kernel; });
  }
  convolution("must not overlap", [](Convolution& p) { p.out = const_cast<float*>(p.x); });
  convolution("must not overlap", [](Convolution& p) { p.out = const_cast<float*>(p.x) + 75; });
  convolution("must not overlap", [](Convolution& p) { p.x = p.out + 63; });
  convolution("x, weight and out", [](Convolution& p) { p.weight = nullptr; });
  convolution("pools of states", [](Convolution& p) { p.state.working.data = nullptr; });
  convolution("pools of states", [](Convolution& p) { p.state.checkpoints.data = nullptr; });
  convolution("slot_bytes", [](Convolution& p) { p.state.working.slot_bytes = 128; });
  convolution("slot_bytes", [](Convolution& p) { p.state.checkpoints.slot_bytes = 1000; });

  const auto delta = [](const std::string& text, const auto& change) {
    CheckRefused(
        text, [&](Arguments& a) { change(a.delta); }, false, true);
  };
  using Delta = GatedDeltaParams;
  for (const int dim : {0, -16, 24, 272}) {
    delta("key_dim and value_dim", [&](Delta& p) { p.key_dim = dim; });
    delta("key_dim and value_dim", [&](Delta& p) { p.value_dim = dim; });
  }
  for (const int heads : {0, -1, 3}) {
    delta("value_heads must be", [&](Delta& p) { p.key_heads = heads; });
  }
  delta("value_heads must be", [](Delta& p) { p.value_heads = 0; });
  delta("qkv_stride", [](Delta& p) { p.qkv_stride = 63; });
  delta("gate_stride", [](Delta& p) { p.gate_stride = 1; });
  delta("q, k, v and out", [](Delta& p) { p.v = nullptr; });
  delta("b, a, decay and dt_bias", [](Delta& p) { p.dt_bias = nullptr; });
  delta("slot_bytes", [](Delta& p) { p.state.working.slot_bytes = (1 << 14) - 64; });
}
