#include "turbomind/backend/cpu/ceilings.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/null_device.h"
#include "sanitized_sample.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"

using namespace turbomind;

namespace {

constexpr double kSeconds = 0.05;

CpuCeilingKernels KernelsOf(const std::string& isa) {
  CpuCeilingKernels kernels;
  if (isa == "amx") {
    amx::FillCeilingKernels(kernels);
  } else if (isa == "avx512") {
    avx512::FillCeilingKernels(kernels);
  } else if (isa == "avx2") {
    avx2::FillCeilingKernels(kernels);
  } else {
    scalar::FillCeilingKernels(kernels);
  }
  return kernels;
}

void CheckProducts(const MultiplyCeiling& ceiling, uint32_t ones, float sum_of_lane) {
  alignas(64) uint32_t operands[kCeilingOperandBytes / 4];
  std::fill(std::begin(operands), std::end(operands), ones);
  const auto* bytes = reinterpret_cast<const uint8_t*>(operands);
  CHECK(ceiling.operations > 0);
  CHECK(ceiling.run(bytes, 0) == 0.f);
  CHECK(ceiling.run(bytes, 10) == sum_of_lane);
}

}  // namespace

TEST_CASE("the loops compute what they claim") {
  for (const std::string& isa : AvailableCpuIsas()) {
    CAPTURE(isa);
    const CpuCeilingKernels kernels = KernelsOf(isa);
    // With ones, every multiply-add adds one: the total is their number.
    CheckProducts(kernels.fp32, 0x3f800000u, 10.f * kernels.fp32.operations / 2);
    CheckProducts(kernels.int8, 0x01010101u, 10.f * kernels.int8.operations / 2);
    CHECK((kernels.bf16.run != nullptr) == (isa == "avx512" || isa == "amx"));
    if (kernels.bf16.run != nullptr) {
      CheckProducts(kernels.bf16, 0x3f803f80u, 10.f * kernels.bf16.operations / 2);
    }
    CHECK((kernels.tile_int8.run != nullptr) == (isa == "amx"));
    CHECK((kernels.tile_bf16.run != nullptr) == (isa == "amx"));
    if (isa == "amx") {
      CheckProducts(kernels.tile_int8, 0x01010101u, 10.f * kernels.tile_int8.operations / 2);
      CheckProducts(kernels.tile_bf16, 0x3f803f80u, 10.f * kernels.tile_bf16.operations / 2);
    }
  }
}

TEST_CASE("every byte is read") {
  for (const std::string& isa : AvailableCpuIsas()) {
    CAPTURE(isa);
    const CpuCeilingKernels kernels = KernelsOf(isa);
    std::vector<uint8_t> data(1024, 0);
    const uint64_t zeros = kernels.read(data.data(), 1024);
    for (size_t i = 0; i < data.size(); i += 7) {
      data[i] = 1;
      CHECK(kernels.read(data.data(), 1024) != zeros);
      data[i] = 0;
    }
  }
}

TEST_CASE("ceilings are positive, of the device's threads, and soon there") {
  for (const std::string& isa : AvailableCpuIsas()) {
    CAPTURE(isa);
    const auto device = MakeCpuDevice(2, isa);
    const auto begun = std::chrono::steady_clock::now();
    const CpuCeilings ceilings = MeasureCpuCeilings(*device, kSeconds);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    CHECK(ceilings.isa == isa);
    CHECK(ceilings.num_threads == 2);
    CHECK(ceilings.memory.bytes_per_s > 0.0);
    CHECK(ceilings.memory.working_set >= int64_t{64} << 20);
    CHECK(ceilings.l2.bytes_per_s > 0.0);
    CHECK(ceilings.l2.working_set <= 2 * ceilings.caches.l2_bytes);
    CHECK(ceilings.fp32_ops_per_s > 0.0);
    CHECK(ceilings.int8_ops_per_s > 0.0);
    CHECK((ceilings.bf16_ops_per_s > 0.0) == (isa == "avx512" || isa == "amx"));
    CHECK((ceilings.tile_int8_ops_per_s > 0.0) == (isa == "amx"));
    CHECK((ceilings.tile_bf16_ops_per_s > 0.0) == (isa == "amx"));
    if (!testing::kSanitized) {
      CHECK(took.count() < 20.0);  // a loop without end, not a slow machine
    }
  }
}

TEST_CASE("wrong arguments are refused") {
  const auto device = MakeCpuDevice(1);
  for (const double seconds : {0.0, -1.0, 61.0, std::nan("")}) {
    CHECK_THROWS_WITH_AS(MeasureCpuCeilings(*device, seconds), doctest::Contains("seconds: got"),
                         InvalidArgument);
  }
  testing::NullDevice other;
  CHECK_THROWS_WITH_AS(MeasureCpuCeilings(other, 1.0), doctest::Contains("got the device null"),
                       InvalidArgument);
}

TEST_CASE("the sizes of the caches are plausible") {
  const CacheSizes sizes = ReadCacheSizes();
  CHECK(sizes.l2_bytes >= 64 << 10);
  CHECK(sizes.l3_bytes >= sizes.l2_bytes);
  CHECK(sizes.num_l3 >= 1);
}
