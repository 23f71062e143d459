// Linear layers on AMX tiles in BF16 (isa/amx/bf16_linear.h). linear_test.cc has the tests of
// the arithmetic.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

const std::vector<MatrixFormat> kFormats(std::begin(kAllFormats) + 1, std::end(kAllFormats));

bool HasAmx() {
  const std::vector<std::string> isas = AvailableCpuIsas();
  if (std::ranges::find(isas, "amx") != isas.end()) {
    return true;
  }
  MESSAGE("skipped: this machine has no AMX; cpu_shim_test runs the test with a stand-in");
  return false;
}

std::unique_ptr<Device> MakeBf16Device(int threads) {
  return MakeCpuDevice(threads, "amx", {.deterministic = false});
}

// Checks that the products with the rows of the identity are the weights.
void CheckWeights(const Matrix& m) {
  const auto device = MakeBf16Device(2);
  std::vector<float> x(static_cast<size_t>(m.cols * m.cols));
  for (int64_t c = 0; c < m.cols; ++c) {
    x[static_cast<size_t>(c * m.cols + c)] = 1.f;  // row c selects column c
  }
  const auto y =
      RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {static_cast<int>(m.cols)});
  CAPTURE(static_cast<int>(m.format));
  for (int64_t c = 0; c < m.cols; ++c) {
    for (int64_t o = 0; o < m.rows; ++o) {
      REQUIRE(y[static_cast<size_t>(c * m.rows + o)] ==
              m.values[static_cast<size_t>(o * m.cols + c)]);
    }
  }
}

}  // namespace

TEST_CASE("BF16 tiles multiply with the weights of the format, rounded to nearest even") {
  if (!HasAmx()) {
    return;
  }
  for (MatrixFormat format : kFormats) {
    for (int64_t cols : {256, 768}) {
      CheckWeights(RandomBf16Weights(format, 37, cols, static_cast<uint32_t>(cols)));
    }
  }
}

TEST_CASE("BF16 tiles multiply with every finite power of two of MXFP4") {
  if (!HasAmx()) {
    return;
  }
  for (MatrixFormat format : {MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split}) {
    Matrix m = RandomBf16Weights(format, 253, 32, 1);
    for (int e = 0; e < 253; ++e) {
      SetScale(m, e, static_cast<uint8_t>(e));
    }
    RoundValues(m);
    CheckWeights(m);
  }
}

TEST_CASE("fewer than 32 rows have the bits of a deterministic device, and so have F32 weights") {
  if (!HasAmx()) {
    return;
  }
  const auto plain = MakeCpuDevice(2, "avx512");
  const auto device = MakeBf16Device(2);
  const std::vector<float> x = RandomVector(40 * 256, 4);
  const auto check = [&](const Matrix& m, int num_rows) {
    CAPTURE(static_cast<int>(m.format));
    CAPTURE(num_rows);
    const auto want = RunLinear(*plain, *plain->PackMatrix(m.source(), false), x, {}, {num_rows});
    const auto y = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {num_rows});
    CHECK(SameBits(y, want));
  };
  for (MatrixFormat format : kFormats) {
    for (int num_rows : {1, 12, 13, 31}) {
      check(RandomBf16Weights(format, 50, 256, 6), num_rows);
    }
  }
  check(RandomMatrix(MatrixFormat::kF32, 50, 256, 6), 40);
}

TEST_CASE("devices that are deterministic or round activations to 8 bits do not use BF16 tiles") {
  if (!HasAmx()) {
    return;
  }
  const std::vector<float> x = RandomVector(40 * 256, 4);
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomBf16Weights(format, 50, 256, 6);
    const auto bits = [&](const std::string& isa, CpuOptions options) {
      const auto device = MakeCpuDevice(2, isa, options);
      return RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {40});
    };
    CAPTURE(static_cast<int>(format));
    CHECK(SameBits(bits("amx", {.deterministic = true}), bits("avx512", {})));
    CHECK(SameBits(bits("amx", {.int8_activations = true, .deterministic = false}),
                   bits("avx512", {.int8_activations = true})));
    CHECK_FALSE(SameBits(bits("amx", {.deterministic = false}), bits("avx512", {})));
  }
}

TEST_CASE("the name of a device says that it has BF16 tiles") {
  if (!HasAmx()) {
    return;
  }
  CHECK(MakeBf16Device(2)->name() == "cpu (amx, 2 threads, BF16 tiles)");
  CHECK(MakeCpuDevice(2, "amx")->name() == "cpu (amx, 2 threads)");
  CHECK(MakeCpuDevice(2, "amx", {.int8_activations = true, .deterministic = false})->name() ==
        "cpu (amx, 2 threads, int8 activations)");
}
