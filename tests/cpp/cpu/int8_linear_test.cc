// Activations of 8 bits (isa/linear). linear_test.cc has the tests of the arithmetic.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"

using namespace turbomind;
using namespace turbomind::testing;

TEST_CASE("other formats have the same bits on a device with activations of 8 bits") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto plain = MakeCpuDevice(2, isa);
    const auto device = MakeCpuDevice(2, isa, {.int8_activations = true});
    for (MatrixFormat format : {MatrixFormat::kF32, MatrixFormat::kBF16, MatrixFormat::kMxfp4,
                                MatrixFormat::kMxfp4Split, MatrixFormat::kNvfp4}) {
      const Matrix m = RandomMatrix(format, 33, 192, 1);
      const std::vector<float> x = RandomVector(30 * m.cols, 41);
      for (int num_rows : {1, 12, 13, 30}) {
        const auto want =
            RunLinear(*plain, *plain->PackMatrix(m.source(), false), x, {}, {num_rows});
        CAPTURE(isa);
        CAPTURE(static_cast<int>(format));
        CHECK(SameBits(
            RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {num_rows}), want));
      }
    }
  }
}

TEST_CASE("the name of a device says that activations have 8 bits") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const std::string name = MakeCpuDevice(2, isa, {.int8_activations = true})->name();
    CHECK(name == "cpu (" + isa + ", 2 threads, int8 activations)");
    CHECK(MakeCpuDevice(2, isa)->name() == "cpu (" + isa + ", 2 threads)");
  }
}
