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
  void SelectiveScan(const SelectiveScanParams&) override { ++calls; }

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
                   .state = pool,
                   .states = step.states(),
                   .batch = step.batch()};
    delta = {.heads = {.q = floats,
                       .k = floats,
                       .v = floats,
                       .qkv_stride = 64,
                       .a = floats,
                       .gate_stride = 2,
                       .decay = floats,
                       .dt_bias = floats,
                       .out = other,
                       .key_heads = 1,
                       .value_heads = 2,
                       .key_dim = 64,
                       .value_dim = 32,
                       .state = pool,
                       .states = step.states(),
                       .batch = step.batch()},
             .b = floats};
    scan = {.heads = delta.heads, .skip = floats};
  }

  alignas(64) std::array<std::byte, 1 << 14> bytes = {};
  RecurrentStep step;
  ShortConvolutionParams convolution;
  GatedDeltaParams delta;
  SelectiveScanParams scan;
  CountingDevice device;
};

// Checks that the convolution, or both rules of heads, refuse the changed arguments.
void CheckRefused(const std::string& text, const std::function<void(Arguments&)>& change,
                  bool of_convolution, bool of_heads) {
  Arguments a;
  CAPTURE(text);
  change(a);
  const auto refused = [&](const auto& invoke, const auto& params) {
    CHECK_THROWS_WITH_AS(invoke(a.device, params), doctest::Contains(text.c_str()), InternalError);
  };
  if (of_convolution) {
    refused(invokeShortConvolution, a.convolution);
  }
  if (of_heads) {
    refused(invokeGatedDelta, a.delta);
    refused(invokeSelectiveScan, a.scan);
  }
  CHECK(a.device.calls == 0);
}

}  // namespace

TEST_CASE("correct arguments of recurrent layers reach the device") {
  Arguments arguments;
  invokeShortConvolution(arguments.device, arguments.convolution);
  arguments.convolution.in_gate = arguments.convolution.out_gate = arguments.convolution.x;
  invokeShortConvolution(arguments.device, arguments.convolution);
  invokeGatedDelta(arguments.device, arguments.delta);
  invokeSelectiveScan(arguments.device, arguments.scan);
  arguments.delta.heads.states.num_saves = 0;
  arguments.delta.heads.states.saves = nullptr;
  invokeGatedDelta(arguments.device, arguments.delta);
  CHECK(arguments.device.calls == 5);
}

TEST_CASE("slots and saves that cannot be are refused") {
  const auto both = [](const std::string& text, const std::function<void(RecurrentStep&)>& change) {
    CheckRefused(
        text, [&](Arguments& a) { change(a.step); }, true, true);
  };
  both("every sequence must have a slot", [](RecurrentStep& s) { s.slots[1] = -1; });
  both("must name a sequence", [](RecurrentStep& s) { s.saves[2].sequence = 2; });
  both("must name a sequence", [](RecurrentStep& s) { s.saves[0].sequence = -1; });
  both("must name a sequence", [](RecurrentStep& s) { s.saves[1].slot = -1; });
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
  convolution("must not overlap", [](Convolution& p) { p.in_gate = p.out + 63; });
  convolution("must not overlap", [](Convolution& p) { p.out_gate = p.out - 75; });
  convolution("x, weight and out", [](Convolution& p) { p.weight = nullptr; });
  convolution("pools of states", [](Convolution& p) { p.state.data = nullptr; });
  convolution("slot_bytes", [](Convolution& p) { p.state.slot_bytes = 128; });
  convolution("slot_bytes", [](Convolution& p) { p.state.slot_bytes = 1000; });

  using Heads = StateHeads;
  const auto heads = [](const std::string& text, const std::function<void(Heads&)>& change) {
    const auto both = [&](Arguments& a) {
      change(a.delta.heads);
      change(a.scan.heads);
    };
    CheckRefused(text, both, false, true);
  };
  for (const int dim : {0, -16, 24, 272}) {
    heads("key_dim and value_dim", [&](Heads& p) { p.key_dim = dim; });
    heads("key_dim and value_dim", [&](Heads& p) { p.value_dim = dim; });
  }
  for (const int key_heads : {0, -1, 3}) {
    heads("value_heads must be", [&](Heads& p) { p.key_heads = key_heads; });
  }
  heads("value_heads must be", [](Heads& p) { p.value_heads = 0; });
  heads("qkv_stride", [](Heads& p) { p.qkv_stride = 63; });
  heads("gate_stride", [](Heads& p) { p.gate_stride = 1; });
  heads("q, k, v and out", [](Heads& p) { p.v = nullptr; });
  heads("a, decay and dt_bias", [](Heads& p) { p.dt_bias = nullptr; });
  heads("slot_bytes", [](Heads& p) { p.state.slot_bytes = (1 << 14) - 64; });

  Arguments arguments;
  CHECK_THROWS_WITH_AS(
      invokeGatedDelta(arguments.device, {.heads = arguments.delta.heads, .b = nullptr}),
      doctest::Contains("b must be set"), InternalError);
  CHECK_THROWS_WITH_AS(
      invokeSelectiveScan(arguments.device, {.heads = arguments.scan.heads, .skip = nullptr}),
      doctest::Contains("skip must be set"), InternalError);
}
