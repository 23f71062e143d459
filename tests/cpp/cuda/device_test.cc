// A GPU as a device: threads, memory that is short, what of it ends with it.

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {
namespace {

constexpr size_t kBytes = 64;

// Which GPU a thread that has said nothing uses once it has run this.
int GpuAfter(const std::function<void()>& run) {
  int gpu = -1;
  std::thread([&] {
    run();
    gpu = CurrentGpu();
  }).join();
  return gpu;
}

TEST_CASE("a thread of its own uses the device's GPU, whatever it asks first") {
  auto device = MakeDevice(0, {});
  std::vector<uint8_t> host(kBytes, 3);
  void* memory = device->Reserve(kBytes);
  const auto weights = [&] {
    return device->PackMatrix({.data = host.data(), .rows = 1, .cols = kBytes / sizeof(float)},
                              true);
  };
  std::unique_ptr<PackedMatrix> matrix = weights();
  CHECK(GpuAfter([&] { device->Copy(memory, host.data(), kBytes); }) == 0);
  CHECK(GpuAfter([&] { device->Synchronize(); }) == 0);
  CHECK(GpuAfter([&] { device->ReadBack(memory, kBytes); }) == 0);
  CHECK(GpuAfter([&] { device->Release(device->Reserve(kBytes), kBytes); }) == 0);
  CHECK(GpuAfter([&] { device->Release(memory, kBytes); }) == 0);
  CHECK(GpuAfter([&] { weights(); }) == 0);
  CHECK(GpuAfter([&] { matrix.reset(); }) == 0);
  CHECK(GpuAfter([&] { device.reset(); }) == 0);
}

TEST_CASE("what does not fit the GPU says how much and what to change") {
  const auto device = MakeDevice(0, {});
  const size_t wanted = PropertiesOf(0).memory_bytes + 1;
  std::string what;
  try {
    device->Reserve(wanted);
  } catch (const std::bad_alloc& error) {
    what = error.what();
  }
  CHECK(what.find("GPU memory: " + std::to_string(wanted) + " bytes wanted, ") == 0);
  CHECK(what.find(" free; lower --cache-max-entry-count or --max-batch-size") != std::string::npos);
  void* memory = device->Reserve(kBytes);  // the device goes on
  device->Release(memory, kBytes);
}

TEST_CASE("a device has the threads that are asked for") {
  for (const int num_threads : {1, 3}) {
    const auto device = MakeDevice(0, {.num_threads = num_threads});
    CHECK(device->num_host_threads() == num_threads);
    CHECK(device->name().find(num_threads == 1 ? ", 1 thread)" : ", 3 threads)") !=
          std::string::npos);
  }
  CHECK_THROWS_AS(MakeDevice(0, {.num_threads = 0}), InvalidArgument);
}

}  // namespace
}  // namespace turbomind::cuda
