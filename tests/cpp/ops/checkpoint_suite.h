#pragma once

// The properties of checkpoints (ops/checkpoint_params.h), for the devices of a backend.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "ops/device_suite.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/ops/checkpoints.h"

namespace turbomind::testing {

inline constexpr StateShape kStateShape = {
    .num_layers = 3, .exact_bytes = 192, .rows = 300, .cols = 48};
inline constexpr int kNumStates = 3;
inline constexpr int kNumCheckpoints = 4;
// A state may be saved twice, and a checkpoint be restored twice.
inline const std::vector<StateCopy> kSaves = {{2, 1}, {0, 3}, {0, 0}};
inline const std::vector<StateCopy> kRestores = {{1, 1}, {0, 3}};

// The bytes of both pools.
struct StatePools {
  std::vector<std::byte> states;
  std::vector<std::byte> checkpoints;

  bool operator==(const StatePools&) const = default;
};

inline bool Same(const StatePools& a, const StatePools& b) { return a == b; }

// Copies random states to checkpoints and back, and returns the bytes of both pools.
struct CheckpointRun {
  explicit CheckpointRun(StateFormat state_format, float first = 1.f) : format(state_format) {
    const auto count = static_cast<size_t>(kNumStates * kStateShape.Bytes(StateFormat::kF32) / 4);
    values = RandomVector(static_cast<int64_t>(count), 31);
    values[static_cast<size_t>(kStateShape.exact_bytes / 4)] = first;  // of a row of slot 0
    for (size_t i = 0; i < 48; ++i) {  // a row of zeros, which has no scale
      values[static_cast<size_t>(kStateShape.exact_bytes / 4) + 96 + i] = 0.f;
    }
  }

  StatePools operator()(Device& device) const {
    const auto state_bytes = static_cast<size_t>(kNumStates * StateBytes());
    const auto checkpoint_bytes = static_cast<size_t>(kNumCheckpoints * CheckpointBytes());
    auto* states = static_cast<std::byte*>(device.Reserve(state_bytes));
    auto* checkpoints = static_cast<std::byte*>(device.Reserve(checkpoint_bytes));
    StatePools pools = {std::vector<std::byte>(state_bytes),
                        std::vector<std::byte>(checkpoint_bytes)};
    std::memcpy(pools.states.data(), values.data(), state_bytes);
    device.Copy(states, pools.states.data(), state_bytes);
    StateCopyParams params = {.states = {states, StateBytes()},
                              .checkpoints = {checkpoints, CheckpointBytes()},
                              .shape = kStateShape,
                              .format = format,
                              .copies = kSaves.data(),
                              .num_copies = static_cast<int>(kSaves.size())};
    invokeSaveCheckpoints(device, params);
    params.copies = kRestores.data();
    params.num_copies = static_cast<int>(kRestores.size());
    invokeRestoreCheckpoints(device, params);
    device.Copy(pools.states.data(), states, state_bytes);
    device.Copy(pools.checkpoints.data(), checkpoints, checkpoint_bytes);
    device.Synchronize();
    device.Release(states, state_bytes);
    device.Release(checkpoints, checkpoint_bytes);
    return pools;
  }

  static int64_t StateBytes() { return kStateShape.Bytes(StateFormat::kF32); }
  int64_t CheckpointBytes() const { return kStateShape.Bytes(format); }
  // Returns the values of a layer in a slot of `bytes`.
  static std::span<const float> Layer(const void* bytes, int slot, int layer) {
    const auto size = static_cast<size_t>(kStateShape.LayerBytes(StateFormat::kF32) / 4);
    const auto index = static_cast<size_t>(slot * kStateShape.num_layers + layer);
    return {static_cast<const float*>(bytes) + index * size, size};
  }

  StateFormat format;
  std::vector<float> values;
};

// Checks a row that was saved and restored.
inline void CheckRow(StateFormat format, std::span<const float> want, std::span<const float> got) {
  double max = 0;
  for (const float value : want) {
    max = std::max<double>(max, std::abs(value));
  }
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(double{want[i]} - double{got[i]});
    switch (format) {
      case StateFormat::kF32:
        CHECK(got[i] == want[i]);
        break;
      case StateFormat::kBf16:
        CHECK(got[i] == BFloat16ToFloat(FloatToBFloat16(want[i])));
        break;
      case StateFormat::kInt8:
        CHECK(error <= max / 127 * 0.500001);
        break;
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "checkpoints of every format give back what they promise") {
  for (const StateFormat format : {StateFormat::kF32, StateFormat::kBf16, StateFormat::kInt8}) {
    CAPTURE(static_cast<int>(format));
    const CheckpointRun run(format);
    const auto pools = OnAll(run);
    const auto exact = static_cast<size_t>(kStateShape.exact_bytes / 4);
    const auto cols = static_cast<size_t>(kStateShape.cols);
    for (int layer = 0; layer < kStateShape.num_layers; ++layer) {
      const auto before = [&](int slot) { return run.Layer(run.values.data(), slot, layer); };
      const auto after = [&](int slot) { return run.Layer(pools.states.data(), slot, layer); };
      // Slot 2 was saved and restored to slot 1, slot 0 to itself.
      for (const auto& [from, to] : {std::pair{2, 1}, std::pair{0, 0}}) {
        CHECK(std::ranges::equal(after(to).first(exact), before(from).first(exact)));
        for (int64_t row = 0; row < kStateShape.rows; ++row) {
          const size_t at = exact + static_cast<size_t>(row) * cols;
          CheckRow(format, before(from).subspan(at, cols), after(to).subspan(at, cols));
        }
      }
      CHECK(std::ranges::equal(after(2), before(2)));
    }
    // The state of slot 0 was saved twice, and nothing to checkpoint 2.
    const auto size = static_cast<size_t>(run.CheckpointBytes());
    const std::span checkpoints(pools.checkpoints);
    CHECK(std::ranges::equal(checkpoints.first(size), checkpoints.subspan(3 * size, size)));
    CHECK(std::ranges::all_of(checkpoints.subspan(2 * size, size),
                              [](std::byte byte) { return byte == std::byte{0}; }));
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "a checkpoint of a state that is not finite is not finite") {
  for (const StateFormat format : {StateFormat::kBf16, StateFormat::kInt8}) {
    for (const float wrong :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      CAPTURE(wrong);
      const CheckpointRun run(format, wrong);
      ForAll([&](Device& device) {
        const auto pools = run(device);
        const std::span layer = run.Layer(pools.states.data(), 0, 0);
        const auto row = layer.subspan(static_cast<size_t>(kStateShape.exact_bytes / 4), 48);
        CHECK(!std::ranges::all_of(row, [](float value) { return std::isfinite(value); }));
        CHECK(std::ranges::all_of(layer.subspan(layer.size() - 48),
                                  [](float value) { return std::isfinite(value); }));
      });
    }
  }
}

}  // namespace turbomind::testing
