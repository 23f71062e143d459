#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/check.h"
#include "turbomind/core/float_convert.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

constexpr MatrixFormat kFormat = MatrixFormat::kNvfp4;

std::vector<std::unique_ptr<Device>> Devices(int threads = 2) {
  std::vector<std::unique_ptr<Device>> devices;
  for (const std::string& isa : AvailableCpuIsas()) {
    devices.push_back(MakeCpuDevice(threads, isa));
  }
  return devices;
}

}  // namespace

TEST_CASE("every instruction set computes NVFP4 as it is stored") {
  const Matrix m = RandomMatrix(kFormat, 20, 128, 1);
  for (const auto& device : Devices(1)) {
    CAPTURE(device->name());
    CHECK(device->capability().has_nvfp4);
    CHECK(device->PackMatrix(m.source(), true)->format == MatrixFormat::kF32);
    CHECK(device->PackMatrix(m.source(), false)->format == kFormat);
  }
}

TEST_CASE("a scale of NVFP4 has the value of its E4M3 number without the sign") {
  for (int scale = 0; scale < 0x7f; ++scale) {
    CHECK(NvScaleToFloat(static_cast<uint8_t>(scale)) == E4M3ToFloat(static_cast<uint8_t>(scale)));
    CHECK(NvScaleToFloat(static_cast<uint8_t>(scale | 0x80)) ==
          NvScaleToFloat(static_cast<uint8_t>(scale)));
  }
  CHECK(NvScaleToFloat(0x7f) == 480.f);
}

TEST_CASE("DequantizeMatrixRow of NVFP4 returns the exact values") {
  const Matrix m = RandomMatrix(kFormat, 7, 320, 2);
  std::vector<float> out(320);
  for (int64_t row = 0; row < m.rows; ++row) {
    DequantizeMatrixRow(m.source(), row, out.data());
    for (size_t c = 0; c < 320; ++c) {
      REQUIRE(out[c] == m.values[static_cast<size_t>(row) * 320 + c]);
    }
  }
}

TEST_CASE("NVFP4 agrees with a double reference for every shape") {
  for (const auto& device : Devices()) {
    for (int64_t rows : {1, 16, 37, 130}) {
      for (int64_t cols : {64, 192, 768}) {
        const Matrix m = RandomMatrix(kFormat, rows, cols, static_cast<uint32_t>(rows + cols));
        const std::vector<float> x = RandomVector(70 * (cols + kPad), 7);
        const std::vector<float> bias = RandomVector(rows, 8);
        for (bool exact : {false, true}) {
          const auto weight = device->PackMatrix(m.source(), exact);
          CAPTURE(device->name());
          CAPTURE(rows);
          for (Call call : {Call{1, false, false}, Call{2, true, false}, Call{5, false, true},
                            Call{13, true, true}, Call{70, false, false}}) {
            CAPTURE(call.num_rows);
            CheckAgainstDouble(m, x, bias, RunLinear(*device, *weight, x, bias, call), call, exact);
          }
        }
      }
    }
  }
}

TEST_CASE("a row of NVFP4 has the same bits in every panel and on every instruction set") {
  const Matrix m = RandomMatrix(kFormat, 203, 448, 3);
  const std::vector<float> x = RandomVector(40 * (m.cols + kPad), 4);
  const std::vector<float> bias = RandomVector(m.rows, 5);
  const auto reference = MakeCpuDevice(1, "scalar");
  const auto reference_weight = reference->PackMatrix(m.source(), false);
  const auto want = RunLinear(*reference, *reference_weight, x, bias, {40, true, true});
  for (int threads : {1, 5}) {
    for (const auto& device : Devices(threads)) {
      const auto weight = device->PackMatrix(m.source(), false);
      for (int num_rows = 1; num_rows <= 40; ++num_rows) {
        CAPTURE(device->name());
        CAPTURE(num_rows);
        const auto y = RunLinear(*device, *weight, x, bias, {num_rows, true, true});
        const auto length = static_cast<int64_t>(y.size());
        REQUIRE(SameBits(y, {want.begin(), want.begin() + length}));
      }
    }
  }
}

TEST_CASE("NVFP4 keeps its 16-bit activations on a device with activations of 8 bits") {
  const Matrix m = RandomMatrix(kFormat, 37, 192, 6);
  const std::vector<float> x = RandomVector(13 * (m.cols + kPad), 7);
  for (const auto& device : Devices()) {
    const auto want = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {13});
    const std::string name = device->name();  // cpu (ISA, 2 threads)
    const auto other =
        MakeCpuDevice(2, name.substr(5, name.find(',') - 5), {.int8_activations = true});
    REQUIRE(SameBits(RunLinear(*other, *other->PackMatrix(m.source(), false), x, {}, {13}), want));
  }
}

TEST_CASE("parts with other factors and formats share a linear layer with NVFP4") {
  for (const auto& device : Devices()) {
    std::vector<Matrix> matrices = {RandomMatrix(kFormat, 40, 256, 1),
                                    RandomMatrix(MatrixFormat::kQ6_K, 7, 256, 2),
                                    RandomMatrix(kFormat, 33, 256, 3)};
    matrices[2].factor = 0x1p3f;
    CheckPartsShareALayer(*device, matrices);
  }
}

TEST_CASE("NaN and infinite activations of NVFP4 affect only the outputs of their row") {
  for (const auto& device : Devices()) {
    CheckPoisonStaysInItsRow(*device, RandomMatrix(kFormat, 40, 128, 21));
  }
}

TEST_CASE("the largest codes and scales of NVFP4 times the largest activations do not overflow") {
  constexpr int kRows = 13;  // a panel of 12 and one row
  constexpr int64_t kOutputs = 17;
  for (const uint8_t code : {0x77, 0xff}) {  // 6 and -6
    Matrix m{kFormat, kOutputs, 64, {}, {}};
    for (int64_t row = 0; row < kOutputs; ++row) {
      m.bytes.insert(m.bytes.end(), 4, 0x7e);  // 448
      m.bytes.insert(m.bytes.end(), 32, code);
    }
    for (const float sign : {1.f, -1.f}) {
      // The scale of the activations is 1. Their codes have the halves (127, 0) once, then (126,
      // 127).
      std::vector<float> x(kRows * (64 + kPad), sign * 32383.f);
      for (size_t r = 0; r < kRows; ++r) {
        x[r * (64 + kPad)] = x[r * (64 + kPad) + 32] = sign * 32512.f;
      }
      const double value = (code == 0x77 ? 6.0 : -6.0) * 448;
      const double want = sign * value * 2.0 * (32512 + 31 * 32383.0);
      for (const auto& device : Devices(1)) {
        const auto weight = device->PackMatrix(m.source(), false);
        const auto y = RunLinear(*device, *weight, x, {}, {kRows});
        for (size_t r = 0; r < kRows; ++r) {
          for (size_t o = 0; o < kOutputs; ++o) {
            const float got = y[r * (kOutputs + kPad) + o];
            REQUIRE(std::abs(got - want) <= std::abs(want) * SumBound(64));
          }
        }
      }
    }
  }
}

TEST_CASE("packed NVFP4 returns exact embedding rows") {
  const Matrix m = RandomMatrix(kFormat, 50, 192, 41);
  std::vector<float> want(192);
  for (const auto& device : Devices()) {
    const auto table = device->PackMatrix(m.source(), false);
    for (int32_t id = 0; id < 50; ++id) {
      std::vector<float> out(192, kSentinel);
      device->Embed({table.get(), &id, out.data(), 1});
      DequantizeMatrixRow(m.source(), id, want.data());
      REQUIRE(SameBits(out, want));
    }
  }
}

TEST_CASE("packed NVFP4 has the bits of its file and can be loaded from its bytes") {
  const Matrix m = RandomMatrix(kFormat, 48, 512, 47);
  for (const auto& device : Devices()) {
    const std::shared_ptr<const PackedMatrix> first = device->PackMatrix(m.source(), false);
    // A tile adds a factor of 4 bytes for each output.
    CHECK(first->num_bytes() == static_cast<int64_t>(m.bytes.size()) + 4 * 48);
    CHECK(first->num_bytes() == PackedBytes(kFormat, 48, 512));
    MatrixSource packed{kFormat, first->packed_data(), 48, 512};
    packed.packed = true;
    const auto copied = device->PackMatrix(packed, false);
    packed.owner = first;
    const auto in_place = device->PackMatrix(packed, false);
    CHECK(in_place->packed_data() == first->packed_data());
    CHECK(std::memcmp(copied->packed_data(), first->packed_data(),
                      static_cast<size_t>(first->num_bytes())) == 0);
    CHECK_THROWS_AS(device->PackMatrix(packed, true), InvalidArgument);
  }
}

// As in linear_test.cc: a change of the tiles needs a new kPackedLayoutId.
TEST_CASE("the tiles of NVFP4 match the layout id") {
  REQUIRE(kPackedLayoutId == 1);
  const auto device = MakeCpuDevice(1, "scalar");
  const auto packed = device->PackMatrix(RandomMatrix(kFormat, 20, 512, 53).source(), false);
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (int64_t i = 0; i < packed->num_bytes(); ++i) {
    hash = (hash ^ packed->packed_data()[i]) * 0x100000001b3;
  }
  CHECK(hash == 14414699395029792454u);
}

TEST_CASE("NVFP4 with incomplete blocks or a wrong factor is rejected") {
  const auto device = MakeCpuDevice(1, "scalar");
  const std::vector<uint8_t> bytes(4096);
  for (bool exact : {false, true}) {
    for (int64_t cols : {16, 32, 63, 65, 96}) {
      CHECK_THROWS_AS(device->PackMatrix({kFormat, bytes.data(), 4, cols}, exact), InvalidArgument);
    }
    for (float factor : {0.f, -1.f, std::numeric_limits<float>::quiet_NaN(),
                         std::numeric_limits<float>::infinity(), 1e36f}) {
      MatrixSource source{kFormat, bytes.data(), 4, 64};
      source.factor = factor;
      CHECK_THROWS_AS(device->PackMatrix(source, exact), InvalidArgument);
    }
    MatrixSource other{MatrixFormat::kQ4_0, bytes.data(), 4, 64};
    other.factor = 2.f;
    CHECK_THROWS_AS(device->PackMatrix(other, exact), InvalidArgument);
  }
}
