#pragma once

// Opens a device, reserves memory on it, and times steps.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench_line.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda_loader.h"
#include "turbomind/ops/device.h"

namespace turbomind::bench {

constexpr int kWarmSteps = 3;  // run the ops, record them, replay them once
constexpr int kRounds = 5;

// The device that the arguments select: device=cuda gpu=0, or device=cpu threads=1 int8=0. `int8`
// rounds activations to 8 bits.
struct DeviceChoice {
  explicit DeviceChoice(Cell& arguments)
      : kind(arguments.Text("device", "cuda")),
        gpu(arguments.Number("gpu", 0)),
        threads(arguments.Number("threads", 1)),
        int8(arguments.Number("int8", 0) != 0) {
    if (kind != "cuda" && kind != "cpu") {
      throw std::invalid_argument("device is " + kind + ". It must be cuda or cpu.");
    }
  }
  bool uses_gpu() const { return kind == "cuda"; }

  // Throws InvalidArgument if there is no such device.
  std::shared_ptr<Device> Make() const {
    return uses_gpu() ? MakeCudaDevice(gpu, {})
                      : MakeCpuDevice(threads, "", {.int8_activations = int8});
  }

  void Print(const Device& device) const {
    Json line;
    if (!uses_gpu()) {
      line.Add("device", device.name()).Add("kind", kind).Print();
      return;
    }
    const CudaDeviceInfo info = CudaDevices().at(static_cast<size_t>(gpu));
    line.Add("device", info.name)
        .Add("kind", kind)
        .Add("generation", info.capability.generation)
        .Add("memory_bytes", info.memory_bytes)
        .Print();
  }

  std::string kind;
  int gpu;
  int threads;
  bool int8;
};

// Memory of a device, filled with zeros or with given values.
class DeviceBuffer {
 public:
  DeviceBuffer(Device& device, size_t num_bytes)
      : device_(device), num_bytes_(num_bytes), data_(device.Reserve(num_bytes)) {}
  template <class T>
  DeviceBuffer(Device& device, const std::vector<T>& values)
      : DeviceBuffer(device, values, static_cast<int64_t>(values.size())) {}
  // Holds `count` values: the given ones, repeated.
  template <class T>
  DeviceBuffer(Device& device, const std::vector<T>& values, int64_t count)
      : DeviceBuffer(device, static_cast<size_t>(count) * sizeof(T)) {
    const size_t given = std::min(num_bytes_, values.size() * sizeof(T));
    device.Copy(data_, values.data(), given);
    Repeat(given);
  }
  ~DeviceBuffer() { device_.Release(data_, num_bytes_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  template <class T>
  T* As() const {
    return static_cast<T*>(data_);
  }
  size_t num_bytes() const { return num_bytes_; }

  // Fills the buffer with copies of its first `num_bytes`.
  void Repeat(size_t num_bytes) {
    auto* data = As<std::byte>();
    for (size_t done = num_bytes; done < num_bytes_;) {
      const size_t next = std::min(done, num_bytes_ - done);
      device_.Copy(data + done, data, next);
      done += next;
    }
    device_.Synchronize();
  }

 private:
  Device& device_;
  size_t num_bytes_;
  void* data_;
};

// Microseconds of one launch: the time of a round, host work included, divided by its launches.
struct Timing {
  double median = 0;
  double low = 0;
  double high = 0;
  int64_t launches = 0;  // of all rounds
};

// Measures `step`, which gives the device `launches` launches. Steps follow each other without
// waiting.
template <class Step>
Timing Measure(Device& device, int launches, double round_seconds, Step step) {
  using Clock = std::chrono::steady_clock;
  const auto run = [&](int64_t steps) {
    const auto begin = Clock::now();
    for (int64_t i = 0; i < steps; ++i) {
      step();
    }
    device.Synchronize();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  run(kWarmSteps);
  const double once = run(1);
  const auto steps = std::max<int64_t>(1, static_cast<int64_t>(round_seconds / once));
  std::vector<double> rounds;
  for (int i = 0; i < kRounds; ++i) {
    rounds.push_back(run(steps) * 1e6 / static_cast<double>(steps * launches));
  }
  std::sort(rounds.begin(), rounds.end());
  return {rounds[kRounds / 2], rounds.front(), rounds.back(), kRounds * steps * launches};
}

}  // namespace turbomind::bench
