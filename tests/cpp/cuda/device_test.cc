// A GPU as a device, which has the properties of device_suite.h: threads, memory exhaustion and
// object lifetimes.

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/checkpoint_suite.h"
#include "ops/device_suite.h"
#include "ops/recurrent_suite.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind {

testing::Backend testing::TestedBackend() {
  // exp has an error of 2 ulp on a GPU.
  return {.devices = {{"gpu", [] { return cuda::MakeDevice(0, {}); }}}, .relative = 2e-6};
}

namespace cuda {
namespace {

constexpr size_t kBytes = 64;
constexpr size_t kReserved = 64 << 20;

// Return the GPU that a new thread uses after it has called `run`.
int GpuAfter(const std::function<void()>& run) {
  int gpu = -1;
  std::thread([&] {
    run();
    gpu = CurrentGpu();
  }).join();
  return gpu;
}

TEST_CASE("a new thread uses the device's GPU, whichever call comes first") {
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
  CHECK(GpuAfter([&] { device->free_bytes(); }) == 0);
  CHECK(GpuAfter([&] { device->ReadBack(memory, kBytes); }) == 0);
  CHECK(GpuAfter([&] { device->Release(device->Reserve(kBytes), kBytes); }) == 0);
  CHECK(GpuAfter([&] { device->Release(memory, kBytes); }) == 0);
  CHECK(GpuAfter([&] { weights(); }) == 0);
  CHECK(GpuAfter([&] { matrix.reset(); }) == 0);
  CHECK(GpuAfter([&] { device.reset(); }) == 0);
}

TEST_CASE("an allocation that does not fit the GPU reports sizes and options") {
  const auto device = MakeDevice(0, {});
  const size_t wanted = PropertiesOf(0).memory_bytes + 1;
  std::string what;
  try {
    device->Reserve(wanted);
  } catch (const std::bad_alloc& error) {
    what = error.what();
  }
  CHECK(what.find("GPU memory: " + std::to_string(wanted) + " bytes are needed, but only ") == 0);
  CHECK(what.find(" free. Lower --cache-max-entry-count or --max-batch-size.") !=
        std::string::npos);
  void* memory = device->Reserve(kBytes);  // the device still works
  device->Release(memory, kBytes);
}

TEST_CASE("free_bytes is the free memory of the GPU") {
  const auto device = MakeDevice(0, {});
  const int64_t before = device->free_bytes().value();
  void* memory = device->Reserve(kReserved);
  CHECK(before - device->free_bytes().value() >= int64_t{kReserved});
  device->Release(memory, kReserved);
}

TEST_CASE("a device has the requested number of threads") {
  for (const int num_threads : {1, 3}) {
    const auto device = MakeDevice(0, {.num_threads = num_threads});
    CHECK(device->num_host_threads() == num_threads);
    CHECK(device->name().find(num_threads == 1 ? ", 1 thread)" : ", 3 threads)") !=
          std::string::npos);
  }
  CHECK_THROWS_AS(MakeDevice(0, {.num_threads = 0}), InvalidArgument);
}

}  // namespace
}  // namespace cuda
}  // namespace turbomind
