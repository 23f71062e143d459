// The CPU as a device, which has the properties of device_suite.h: instruction sets, threads and
// memory.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "ops/checkpoint_suite.h"
#include "ops/device_suite.h"
#include "ops/recurrent_suite.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"

using namespace turbomind;

testing::Backend testing::TestedBackend() {
  Backend cpu = {.devices = {}, .relative = 1e-6};  // exp has an error of 2 units of 2^-24
  for (const std::string& isa : AvailableCpuIsas()) {
    for (const int threads : {1, 3}) {
      cpu.devices.push_back({isa, [=] { return MakeCpuDevice(threads, isa); }});
    }
  }
  return cpu;
}

TEST_CASE(
    "the device uses the best instruction set unless an argument or the environment selects one") {
  unsetenv("LMDEPLOY_CPU_ISA");
  const auto isas = AvailableCpuIsas();
  REQUIRE(isas.front() == "scalar");
  CHECK(MakeCpuDevice(2)->name() == "cpu (" + isas.back() + ", 2 threads)");
  CHECK(MakeCpuDevice(1, "scalar")->name() == "cpu (scalar, 1 thread)");
  setenv("LMDEPLOY_CPU_ISA", "scalar", 1);
  CHECK(MakeCpuDevice(1)->name() == "cpu (scalar, 1 thread)");
  CHECK(MakeCpuDevice(1, isas.back())->name() == "cpu (" + isas.back() + ", 1 thread)");
  setenv("LMDEPLOY_CPU_ISA", "neon", 1);
  CHECK_THROWS_WITH_AS(MakeCpuDevice(1), doctest::Contains("LMDEPLOY_CPU_ISA is \"neon\""),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(MakeCpuDevice(1, "sse9"), doctest::Contains("scalar"), InvalidArgument);
  unsetenv("LMDEPLOY_CPU_ISA");
}

TEST_CASE("thread counts out of range are rejected") {
  CHECK_THROWS_AS(MakeCpuDevice(0), InvalidArgument);
  CHECK_THROWS_AS(MakeCpuDevice(-3), InvalidArgument);
  CHECK_THROWS_AS(MakeCpuDevice(1 << 20), InvalidArgument);
}

TEST_CASE("memory is reserved lazily") {
  const auto device = MakeCpuDevice(1);
  CHECK(device->capability().reserves_lazily);
  constexpr size_t kHuge = size_t{1} << 40;  // far beyond the machine's memory: only address space
  auto* memory = static_cast<uint8_t*>(device->Reserve(kHuge));
  CHECK(memory[0] == 0);
  CHECK(memory[kHuge - 1] == 0);
  const char text[] = "block";
  device->Copy(memory + kHuge - sizeof(text), text, sizeof(text));
  CHECK(std::equal(text, text + sizeof(text), memory + kHuge - sizeof(text)));
  device->Release(memory, kHuge);
}
