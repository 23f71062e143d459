#pragma once

// The devices that device_suite.h tests, and how results are compared.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/ops/device.h"

namespace turbomind::testing {

struct Backend {
  struct Maker {
    std::string name;
    std::function<std::unique_ptr<Device>()> make;
  };
  std::vector<Maker> devices;  // which give the same bits
  // The relative error of exp, a division and a few FP32 roundings.
  double relative = 0;
};

// Defined by the test that includes this file.
Backend TestedBackend();

// A value in double precision, and how far a device may be from it.
struct Exact {
  double value = 0;
  double error = 0;
};

// Values that are not finite must be of the same kind.
inline bool IsNear(float got, const Exact& want) {
  return std::isfinite(want.value) ? std::abs(got - want.value) <= want.error
         : std::isnan(want.value)  ? std::isnan(got)
                                   : got == want.value;
}

inline void CheckNear(const std::vector<float>& got, const std::vector<Exact>& want) {
  REQUIRE(got.size() == want.size());
  const auto wrong = std::ranges::mismatch(got, want, IsNear);
  const bool all_near = wrong.in1 == got.end();
  CHECK_MESSAGE(all_near, "value ", wrong.in1 - got.begin(), " is ", *wrong.in1, ", not ",
                wrong.in2->value);
}

inline std::vector<float> Normal(int64_t size, uint32_t seed, float deviation) {
  std::vector<float> values = RandomVector(size, seed);
  std::ranges::transform(values, values.begin(), [&](float v) { return deviation * v; });
  return values;
}

// Returns whether the bits are equal. NaN has many.
inline bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(a, b, [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y) || (x != x && y != y);
  });
}

class DeviceSuite {
 public:
  DeviceSuite() {
    for (const Backend::Maker& maker : backend_.devices) {
      devices_.push_back(maker.make());
    }
  }

  double relative() const { return backend_.relative; }

  template <class F>
  void ForAll(const F& check) const {
    for (size_t i = 0; i < devices_.size(); ++i) {
      CAPTURE(backend_.devices[i].name);
      check(*devices_[i]);
    }
  }

  // Returns run(device), which has the same bits in another run and on all devices.
  template <class F>
  auto OnAll(const F& run) const {
    const auto first = run(*devices_[0]);
    ForAll([&](Device& device) { REQUIRE(Same(run(device), first)); });
    return first;
  }

 private:
  const Backend backend_ = TestedBackend();
  std::vector<std::unique_ptr<Device>> devices_;
};

// A step of one sequence.
struct Step {
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;
  std::vector<int32_t> rope_sets = std::vector<int32_t>(tokens.size());
  std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(tokens.size())};
  std::vector<int32_t> context_lens = {positions.back() + 1};
  std::vector<int32_t> table = std::vector<int32_t>(static_cast<size_t>(positions.back() / 64 + 1));

  int size() const { return static_cast<int>(tokens.size()); }

  template <class F>
  void Run(Device& device, const F& ops) const {
    const StepGroup group = {.batch = {.num_seqs = 1,
                                       .num_decode = size() == 1 ? 1 : 0,
                                       .num_tokens = size(),
                                       .cu_seqlens = cu_seqlens.data(),
                                       .context_lens = context_lens.data(),
                                       .positions = positions.data(),
                                       .block_tables = table.data(),
                                       .block_table_stride = static_cast<int64_t>(table.size()),
                                       .rope_sets = rope_sets.data()},
                             .kv_heads = 1};
    device.RunStep({.tokens = tokens.data(), .groups = &group, .num_groups = 1, .q_heads = 1}, ops);
  }
};

}  // namespace turbomind::testing
