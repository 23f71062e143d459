#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
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

constexpr MatrixFormat kFormats[] = {MatrixFormat::kQ4_K, MatrixFormat::kQ5_K, MatrixFormat::kQ6_K};

std::vector<std::unique_ptr<Device>> Devices(int threads = 2) {
  std::vector<std::unique_ptr<Device>> devices;
  for (const std::string& isa : AvailableCpuIsas()) {
    devices.push_back(MakeCpuDevice(threads, isa));
  }
  return devices;
}

// The first byte of d in a super-block of a checkpoint.
constexpr int DAt(MatrixFormat format) { return format == MatrixFormat::kQ6_K ? 208 : 0; }

// Returns a matrix of the largest codes, scales and minima, or of the smallest codes. All of d and
// min are 1.
Matrix ExtremeMatrix(MatrixFormat format, int64_t rows, bool largest) {
  Matrix m{format, rows, 256, {}, {}};
  const auto codes = static_cast<uint8_t>(largest ? 0xff : 0);
  for (int64_t row = 0; row < rows; ++row) {
    if (format == MatrixFormat::kQ6_K) {
      m.bytes.insert(m.bytes.end(), 192, codes);
      m.bytes.insert(m.bytes.end(), 16, 0x80);  // -128
      Append(m.bytes, Half(1));
      continue;
    }
    Append(m.bytes, Half(1));
    Append(m.bytes, Half(1));
    m.bytes.insert(m.bytes.end(), 12, 0xff);
    m.bytes.insert(m.bytes.end(), static_cast<size_t>(SuperBlockBytes(format) - 16), codes);
  }
  return m;
}

}  // namespace

TEST_CASE("every instruction set computes K-quants as they are") {
  for (const std::string& isa : AvailableCpuIsas()) {
    CAPTURE(isa);
    const auto device = MakeCpuDevice(1, isa);
    CHECK(device->capability().has_k_quants);
    for (MatrixFormat format : kFormats) {
      const Matrix m = RandomMatrix(format, 20, 256, 1);
      CHECK(device->PackMatrix(m.source(), true)->format == MatrixFormat::kF32);
      CHECK(device->PackMatrix(m.source(), false)->format == format);
    }
  }
}

TEST_CASE("DequantizeMatrixRow of a K-quant returns the values rounded to FP32") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 7, 768, 2);
    std::vector<float> out(768);
    for (int64_t row = 0; row < m.rows; ++row) {
      DequantizeMatrixRow(m.source(), row, out.data());
      for (size_t c = 0; c < 768; ++c) {
        REQUIRE(out[c] == static_cast<float>(m.values[static_cast<size_t>(row) * 768 + c]));
      }
    }
  }
}

TEST_CASE("a K-quant agrees with a double reference for every shape") {
  for (const auto& device : Devices()) {
    for (MatrixFormat format : kFormats) {
      for (int64_t rows : {1, 16, 37, 130}) {
        for (int64_t cols : {256, 768}) {
          const Matrix m = RandomMatrix(format, rows, cols, static_cast<uint32_t>(rows + cols));
          const std::vector<float> x = RandomVector(70 * (cols + kPad), 7);
          const std::vector<float> bias = RandomVector(rows, 8);
          for (bool exact : {false, true}) {
            const auto weight = device->PackMatrix(m.source(), exact);
            CAPTURE(device->name());
            CAPTURE(static_cast<int>(format));
            CAPTURE(rows);
            for (Call call : {Call{1, false, false}, Call{2, true, false}, Call{5, false, true},
                              Call{13, true, true}, Call{70, false, false}}) {
              CAPTURE(call.num_rows);
              CheckAgainstDouble(m, x, bias, RunLinear(*device, *weight, x, bias, call), call,
                                 exact);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a row of a K-quant has the same bits in every panel and on every instruction set") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 203, 512, 3);
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
          CAPTURE(static_cast<int>(format));
          CAPTURE(num_rows);
          const auto y = RunLinear(*device, *weight, x, bias, {num_rows, true, true});
          const auto length = static_cast<int64_t>(y.size());
          REQUIRE(SameBits(y, {want.begin(), want.begin() + length}));
        }
      }
    }
  }
}

TEST_CASE("parts of K-quants and other formats share a linear layer") {
  for (const auto& device : Devices()) {
    for (MatrixFormat format : kFormats) {
      CheckPartsShareALayer(
          *device, {RandomMatrix(format, 40, 512, 1), RandomMatrix(MatrixFormat::kQ8_0, 7, 512, 2),
                    RandomMatrix(format, 33, 512, 3)});
    }
  }
}

TEST_CASE("NaN and infinite activations of a K-quant affect only the outputs of their row") {
  for (const auto& device : Devices()) {
    for (MatrixFormat format : kFormats) {
      CheckPoisonStaysInItsRow(*device, RandomMatrix(format, 40, 256, 21));
    }
  }
}

TEST_CASE("non-finite scales of a K-quant affect only the outputs of their row") {
  for (MatrixFormat format : kFormats) {
    for (uint16_t bits : {0x7c00, 0xfc00, 0x7e00}) {
      Matrix m = RandomMatrix(format, 40, 512, 23);
      const std::vector<float> x = RandomVector(13 * (m.cols + kPad), 24);
      const auto at = static_cast<size_t>(SourceRow(m.source(), 17) - m.bytes.data());
      const Matrix clean = m;
      std::memcpy(m.bytes.data() + at + DAt(format), &bits, 2);
      for (const auto& device : Devices()) {
        const auto want =
            RunLinear(*device, *device->PackMatrix(clean.source(), false), x, {}, {13});
        const auto y = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {13});
        for (size_t i = 0; i < y.size(); ++i) {
          const bool own = i % static_cast<size_t>(m.rows + kPad) == 17;
          REQUIRE((own ? !std::isfinite(y[i]) : y[i] == want[i]));
        }
      }
    }
  }
}

TEST_CASE("the largest codes and scales times the largest activations do not overflow") {
  constexpr int kRows = 13;  // a panel of 12 and one row
  constexpr int64_t kOutputs = 17;
  for (MatrixFormat format : kFormats) {
    for (const bool largest : {false, true}) {
      const Matrix m = ExtremeMatrix(format, kOutputs, largest);
      std::vector<float> row(256);
      DequantizeMatrixRow(m.source(), 0, row.data());
      for (const float sign : {1.f, -1.f}) {
        // The scale of the activations is 1. Their codes have the halves (127, 0) once, then (126,
        // 127).
        std::vector<float> x(kRows * (256 + kPad), sign * 32383.f);
        for (size_t r = 0; r < kRows; ++r) {
          for (size_t c = 0; c < 256; c += 32) {
            x[r * (256 + kPad) + c] = sign * 32512.f;
          }
        }
        const double want = sign * row[0] * 8.0 * (32512 + 31 * 32383.0);
        for (const auto& device : Devices(1)) {
          const auto weight = device->PackMatrix(m.source(), false);
          const auto y = RunLinear(*device, *weight, x, {}, {kRows});
          for (size_t r = 0; r < kRows; ++r) {
            for (size_t o = 0; o < kOutputs; ++o) {
              const float got = y[r * (kOutputs + kPad) + o];
              REQUIRE(std::abs(got - want) <= std::abs(want) * SumBound(256));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a packed K-quant returns exact embedding rows") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 50, 512, 41);
    std::vector<float> want(512);
    for (const auto& device : Devices()) {
      const auto table = device->PackMatrix(m.source(), false);
      for (int32_t id = 0; id < 50; ++id) {
        std::vector<float> out(512, kSentinel);
        device->Embed({table.get(), &id, out.data(), 1});
        DequantizeMatrixRow(m.source(), id, want.data());
        REQUIRE(SameBits(out, want));
      }
    }
  }
}

TEST_CASE("a packed K-quant has the bits of its file and can be loaded from its bytes") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 48, 512, 47);
    for (const auto& device : Devices()) {
      const std::shared_ptr<const PackedMatrix> first = device->PackMatrix(m.source(), false);
      CHECK(first->num_bytes() == static_cast<int64_t>(m.bytes.size()));
      CHECK(first->num_bytes() == PackedBytes(format, 48, 512));
      MatrixSource packed{format, first->packed_data(), 48, 512};
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
}

// As in linear_test.cc: a change of the tiles needs a new kPackedLayoutId.
TEST_CASE("the tiles of K-quants match the layout id") {
  REQUIRE(kPackedLayoutId == 1);
  const auto device = MakeCpuDevice(1, "scalar");
  const auto hash_of = [&](MatrixFormat format) {
    const Matrix m = RandomMatrix(format, 20, 512, 53);
    const auto packed = device->PackMatrix(m.source(), false);
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (int64_t i = 0; i < packed->num_bytes(); ++i) {
      hash = (hash ^ packed->packed_data()[i]) * 0x100000001b3;
    }
    return hash;
  };
  CHECK(hash_of(MatrixFormat::kQ4_K) == 105624635994506871u);
  CHECK(hash_of(MatrixFormat::kQ5_K) == 8181497459346064651u);
  CHECK(hash_of(MatrixFormat::kQ6_K) == 12674340872646967210u);
}

TEST_CASE("K-quants whose columns are not whole super-blocks are rejected") {
  const auto device = MakeCpuDevice(1, "scalar");
  const std::vector<uint8_t> bytes(4096);
  for (MatrixFormat format : kFormats) {
    for (int64_t cols : {32, 128, 255, 257, 288, 511}) {
      for (bool exact : {false, true}) {
        CHECK_THROWS_AS(device->PackMatrix({format, bytes.data(), 4, cols}, exact),
                        InvalidArgument);
      }
    }
  }
}
