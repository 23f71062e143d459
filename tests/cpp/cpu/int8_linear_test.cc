#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

constexpr MatrixFormat kFormats[] = {MatrixFormat::kQ4_0, MatrixFormat::kQ4_1, MatrixFormat::kQ8_0,
                                     MatrixFormat::kQ4_K, MatrixFormat::kQ5_K, MatrixFormat::kQ6_K};
// Formats whose activations keep their own form.
constexpr MatrixFormat kOthers[] = {MatrixFormat::kF32, MatrixFormat::kBF16, MatrixFormat::kMxfp4,
                                    MatrixFormat::kMxfp4Split};

std::unique_ptr<Device> MakeInt8Device(int threads, const std::string& isa) {
  return MakeCpuDevice(threads, isa, {.int8_activations = true});
}

// Returns the activations as the kernels round them: codes of at most 127 times a scale, for each
// row and block of 32 columns.
std::vector<float> RoundedTo8Bits(const Matrix& m, const std::vector<float>& x) {
  std::vector<float> rounded = x;
  const int64_t stride = m.cols + kPad;
  for (int64_t first = 0; first + m.cols <= static_cast<int64_t>(x.size()); first += stride) {
    for (int64_t c = first; c < first + m.cols; c += 32) {
      const auto begin = rounded.begin() + c;
      float amax = 0;
      std::for_each(begin, begin + 32, [&](float v) { amax = std::max(amax, std::abs(v)); });
      std::for_each(begin, begin + 32, [&](float& v) {
        v = amax == 0 ? 0.f : std::nearbyint(v * (127.f / amax)) * (amax / 127.f);
      });
    }
  }
  return rounded;
}

// A matrix whose codes, scales and minima are the largest, or whose codes are the smallest. All
// factors in FP16 are 1.
Matrix ExtremeMatrix(MatrixFormat format, int64_t rows, bool largest) {
  Matrix m{format, rows, 256, {}, {}};
  const auto codes = static_cast<uint8_t>(largest ? 0xff : 0);
  const auto q8 = static_cast<uint8_t>(largest ? 127 : -128);
  for (int64_t block = 0; block < rows * 256 / SourceBlockCols(format); ++block) {
    if (format == MatrixFormat::kQ6_K) {
      m.bytes.insert(m.bytes.end(), 192, codes);
      m.bytes.insert(m.bytes.end(), 16, 0x80);  // -128
      Append(m.bytes, Half(1));
      continue;
    }
    Append(m.bytes, Half(1));
    if (HasMinimum(format)) {
      Append(m.bytes, IsKQuant(format) ? Half(1) : uint16_t{0});
    }
    if (IsKQuant(format)) {
      m.bytes.insert(m.bytes.end(), 12, 0xff);
    }
    const auto end = static_cast<size_t>((block + 1) * SourceBlockBytes(format));
    m.bytes.resize(end, format == MatrixFormat::kQ8_0 ? q8 : codes);
  }
  return m;
}

}  // namespace

TEST_CASE("products of 8-bit activations agree with a double reference for every shape") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeInt8Device(2, isa);
    for (MatrixFormat format : kFormats) {
      for (int64_t rows : {1, 16, 37, 130}) {
        for (int64_t blocks : {1, 3}) {
          const int64_t cols = blocks * SourceBlockCols(format);
          const Matrix m = RandomMatrix(format, rows, cols, static_cast<uint32_t>(rows + cols));
          const std::vector<float> x = RandomVector(70 * (cols + kPad), 7);
          const std::vector<float> rounded = RoundedTo8Bits(m, x);
          const std::vector<float> bias = RandomVector(rows, 8);
          const auto weight = device->PackMatrix(m.source(), false);
          CAPTURE(isa);
          CAPTURE(static_cast<int>(format));
          CAPTURE(rows);
          for (Call call : {Call{1, false, false}, Call{2, true, false}, Call{5, false, true},
                            Call{13, true, true}, Call{70, false, false}}) {
            CAPTURE(call.num_rows);
            CheckAgainstDouble(m, rounded, bias, RunLinear(*device, *weight, x, bias, call), call,
                               true);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "a row of 8-bit activations has the same bits in every panel, thread and instruction set") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 203, 512, 3);
    const std::vector<float> x = RandomVector(70 * (m.cols + kPad), 4);
    const std::vector<float> bias = RandomVector(m.rows, 5);
    const auto reference = MakeInt8Device(1, "scalar");
    const auto reference_weight = reference->PackMatrix(m.source(), false);
    const auto want = RunLinear(*reference, *reference_weight, x, bias, {70, true, true});
    for (const std::string& isa : AvailableCpuIsas()) {
      for (int threads : {1, 5}) {
        const auto device = MakeInt8Device(threads, isa);
        const auto weight = device->PackMatrix(m.source(), false);
        for (int num_rows = 1; num_rows <= 70; num_rows += isa == "scalar" ? 23 : 1) {
          CAPTURE(isa);
          CAPTURE(threads);
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

TEST_CASE("a row of 8-bit activations has the same bits alone and in several row blocks") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeInt8Device(2, isa);
    for (MatrixFormat format : kFormats) {
      if (isa == "scalar") {
        continue;
      }
      const Matrix m = RandomMatrix(format, 40, 2048, 11);
      const std::vector<float> x = RandomVector(500 * (m.cols + kPad), 12);
      const auto weight = device->PackMatrix(m.source(), false);
      const auto all = RunLinear(*device, *weight, x, {}, {500});
      for (int row : {0, 11, 12, 133, 499}) {
        const std::vector<float> one(x.begin() + row * (m.cols + kPad),
                                     x.begin() + (row + 1) * (m.cols + kPad));
        const auto begin = all.begin() + row * (m.rows + kPad);
        CHECK(SameBits(RunLinear(*device, *weight, one, {}, {1}), {begin, begin + m.rows + kPad}));
      }
    }
  }
}

TEST_CASE("rows of 8-bit activations grouped by weight have the same bits as alone") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeInt8Device(2, isa);
    for (MatrixFormat format : kFormats) {
      CAPTURE(isa);
      CAPTURE(static_cast<int>(format));
      CheckGroupedRows(*device, format);
    }
  }
}

TEST_CASE("F32, BF16 and MXFP4 matrices have the same bits with the option, also beside others") {
  constexpr int64_t kStride = 33 + 20 + kPad;
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto plain = MakeCpuDevice(2, isa);
    const auto device = MakeInt8Device(2, isa);
    const Matrix quantized = RandomMatrix(MatrixFormat::kQ4_1, 20, 96, 2);
    const auto second = device->PackMatrix(quantized.source(), false);
    for (MatrixFormat format : kOthers) {
      const Matrix m = RandomMatrix(format, 33, 96, 1);
      const auto weight = device->PackMatrix(m.source(), false);
      for (int num_rows : {1, 12, 30}) {
        const std::vector<float> x = RandomVector(num_rows * (96 + kPad), 41);
        const auto want =
            RunLinear(*plain, *plain->PackMatrix(m.source(), false), x, {}, {num_rows});
        const auto of_second = RunLinear(*device, *second, x, {}, {num_rows});
        const LinearPart parts[] = {{weight.get(), nullptr}, {second.get(), nullptr}};
        std::vector<float> y(static_cast<size_t>(num_rows * kStride), kSentinel);
        device->Linear({.x = x.data(),
                        .x_stride = 96 + kPad,
                        .parts = parts,
                        .num_parts = 2,
                        .y = y.data(),
                        .y_stride = kStride,
                        .num_rows = num_rows});
        for (int r = 0; r < num_rows; ++r) {
          const auto row = y.begin() + r * kStride;
          CHECK(std::equal(row, row + 33, want.begin() + r * (33 + kPad)));
          CHECK(std::equal(row + 33, row + 53, of_second.begin() + r * (20 + kPad)));
        }
      }
    }
  }
}

TEST_CASE("the largest codes times the largest 8-bit activations are summed exactly") {
  constexpr int kRows = 13;  // a panel of 12 and one row
  constexpr int64_t kOutputs = 17;
  for (MatrixFormat format : kFormats) {
    for (const bool largest : {false, true}) {
      const Matrix m = ExtremeMatrix(format, kOutputs, largest);
      std::vector<float> row(256);
      DequantizeMatrixRow(m.source(), 0, row.data());
      for (const float sign : {1.f, -1.f}) {
        const std::vector<float> x(kRows * (256 + kPad), sign * 127.f);  // their scale is 1
        const double want = sign * row[0] * 127.0 * 256;
        for (const std::string& isa : AvailableCpuIsas()) {
          const auto device = MakeInt8Device(1, isa);
          const auto y = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {kRows});
          for (size_t r = 0; r < kRows; ++r) {
            for (size_t o = 0; o < kOutputs; ++o) {
              CAPTURE(isa);
              CAPTURE(static_cast<int>(format));
              // Sums of 8 blocks in FP32.
              REQUIRE(std::abs(y[r * (kOutputs + kPad) + o] - want) <= std::abs(want) * 0x1p-20);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("NaN and infinite activations affect only the outputs of their row with 8 bits, too") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeInt8Device(1, isa);
    for (MatrixFormat format : kFormats) {
      CheckPoisonStaysInItsRow(*device, RandomMatrix(format, 40, 256, 21));
    }
  }
}

TEST_CASE("zero, tiny and huge activations do not overflow the scale of 8-bit codes") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeInt8Device(1, isa);
    const Matrix m = RandomMatrix(MatrixFormat::kQ8_0, 16, 32, 31);
    const auto weight = device->PackMatrix(m.source(), false);
    for (float magnitude : {0.f, 1e-44f, 1e-37f, 1e-30f, 1e34f}) {
      const std::vector<float> x(static_cast<size_t>(m.cols + kPad), magnitude);
      const auto y = RunLinear(*device, *weight, x, {}, {1});
      for (int64_t o = 0; o < m.rows; ++o) {
        REQUIRE(std::isfinite(y[static_cast<size_t>(o)]));
        REQUIRE((magnitude > 0.f || y[static_cast<size_t>(o)] == 0.f));
      }
    }
  }
}

TEST_CASE("the name of a device says that activations have 8 bits") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const std::string name = MakeInt8Device(2, isa)->name();
    CHECK(name == "cpu (" + isa + ", 2 threads, int8 activations)");
    CHECK(MakeCpuDevice(2, isa)->name() == "cpu (" + isa + ", 2 threads)");
  }
}
