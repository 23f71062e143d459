// Tests FP8 weights on a GPU: every code, and products with 8-bit activations by the library. Other
// properties of the format are in linear_ops_test.cc.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/linear/cublas_lt.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

using testing::Call;
using testing::Matrix;
using testing::RandomMatrix;
using testing::RandomVector;
using testing::SameBits;

constexpr MatrixFormat kFormats[] = {MatrixFormat::kFp8, MatrixFormat::kFp8Block};
constexpr int kRows = 64;  // the library computes from here on
// FP8 products of Hopper add in about 14 bits. Wrong codes or scales cost 2^-4.
constexpr double kSumError = 0x1p-10;

// Return null if a machine with a GPU has no cuBLASLt.
std::unique_ptr<Device> WithLibrary(bool deterministic = false) {
  std::string why;
  if (CublasLt::Load({TM_CUBLAS_LT}, &why) == nullptr) {
    MESSAGE("skipped: " << why);
    return nullptr;
  }
  return MakeDevice(
      0, {.deterministic = deterministic, .fp8_activations = true, .cublas_lt = {TM_CUBLAS_LT}});
}

double ValueOfCode(int code) {
  return code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
}

// Return the nearest value of E4M3, of two the one with the even code.
double NearestE4m3(double x) {
  double best = 0;
  int best_code = 0;
  for (int code = 0; code < 127; ++code) {
    const double value = ValueOfCode(code);
    const double error = std::abs(std::abs(x) - value) - std::abs(std::abs(x) - best);
    if (error < 0 || (error == 0 && code % 2 == 0 && best_code % 2 == 1)) {
      best = value;
      best_code = code;
    }
  }
  return std::copysign(best, x);
}

// Return x as 8-bit activations with one scale for each `group` columns.
std::vector<float> Quantized(const std::vector<float>& x, int64_t cols, int64_t group) {
  std::vector<float> rounded;
  for (auto row = x.begin(); row != x.end(); row += cols) {
    for (int64_t first = 0; first < cols; first += group) {
      const auto begin = row + first;
      const auto end = row + std::min(cols, first + group);
      float largest = 0x1p-100f;
      std::for_each(begin, end, [&](float v) { largest = std::max(largest, std::abs(v)); });
      const double scale = largest / 448.f;
      std::for_each(begin, end, [&](float v) {
        rounded.push_back(static_cast<float>(NearestE4m3(double{v * (448.f / largest)}) * scale));
      });
    }
  }
  return rounded;
}

struct Layer {
  std::vector<Matrix> matrices;
  std::vector<std::vector<float>> biases;
};

Layer RandomLayer(const std::vector<MatrixFormat>& formats, const std::vector<int64_t>& outputs,
                  int64_t cols) {
  Layer layer;
  for (size_t i = 0; i < formats.size(); ++i) {
    const auto seed = static_cast<uint32_t>(i + static_cast<size_t>(cols));
    layer.matrices.push_back(RandomMatrix(formats[i], outputs[i], cols, seed));
    layer.biases.push_back(i % 2 == 0 ? RandomVector(outputs[i], seed) : std::vector<float>());
  }
  return layer;
}

std::vector<float> Run(Device& device, const Layer& layer, const std::vector<float>& x, Call call) {
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<const PackedMatrix*> parts;
  for (const Matrix& m : layer.matrices) {
    weights.push_back(device.PackMatrix(m.source(), false));
    parts.push_back(weights.back().get());
  }
  return testing::RunParts(device, parts, layer.biases, x, call);
}

void CheckLayer(const Layer& layer, const std::vector<float>& x, const std::vector<float>& y,
                Call call) {
  const int64_t cols = layer.matrices[0].cols;
  auto got = y.begin();
  for (int r = 0; r < call.num_rows; ++r) {
    for (size_t i = 0; i < layer.matrices.size(); ++i) {
      const Matrix& m = layer.matrices[i];
      for (int64_t o = 0; o < m.rows; ++o, ++got) {
        double want = call.accumulate ? testing::kSentinel : 0.0;
        want += layer.biases[i].empty() ? 0.0 : layer.biases[i][static_cast<size_t>(o)];
        double magnitude = std::abs(want);
        for (int64_t c = 0; c < cols; ++c) {
          const double product = m.values[static_cast<size_t>(o * cols + c)] *
                                 double{x[static_cast<size_t>(r * cols + c)]};
          want += product;
          magnitude += std::abs(product);
        }
        if (!(std::abs(*got - want) <= kSumError * magnitude)) {
          FAIL_CHECK("row " << r << " matrix " << i << " output " << o << ": got " << *got
                            << ", want " << want);
          return;
        }
      }
    }
  }
}

// Multiplies with the rows of the identity: an output is a value of its matrix.
TEST_CASE("every code of FP8 has its value") {
  constexpr int kCodes = 256;
  const std::unique_ptr<Device> device = MakeDevice(0, {});
  for (MatrixFormat format : kFormats) {
    Matrix m{format, 16, kCodes, {}, {}};
    for (int i = 0; i < 16 * kCodes; ++i) {
      const int code = (i + i / kCodes) % kCodes;
      m.bytes.push_back(static_cast<uint8_t>(code % 128 == 127 ? 0 : code));
    }
    for (int64_t i = 0; i < 16 * NumFp8Scales(format, kCodes); ++i) {
      testing::Append(m.scales, 1.f);
    }
    std::vector<float> x(kCodes * kCodes);
    for (size_t i = 0; i < kCodes; ++i) {
      x[i * kCodes + i] = 1.f;
    }
    const Layer layer = {{m}, {{}}};
    for (int num_rows : {7, 12, kCodes}) {  // few rows have other kernels
      const std::vector<float> y = Run(*device, layer, x, {num_rows});
      for (int i = 0; i < num_rows * 16; ++i) {
        const uint8_t code = m.bytes[static_cast<size_t>(i % 16 * kCodes + i / 16)];
        const double magnitude = ValueOfCode(code % 128);
        REQUIRE(y[static_cast<size_t>(i)] == (code < 128 ? magnitude : -magnitude));
      }
    }
  }
}

TEST_CASE("scales that are not above 0 or that make values infinite are refused") {
  const std::unique_ptr<Device> device = MakeDevice(0, {});
  for (MatrixFormat format : kFormats) {
    for (bool exact : {false, true}) {
      for (float scale : {0.f, -1.f, testing::kNan, testing::kInf, 1e36f}) {
        Matrix m = RandomMatrix(format, 20, 200, 1);
        CHECK(device->PackMatrix(m.source(), exact)->rows == 20);
        std::memcpy(m.scales.data() + m.scales.size() - 4, &scale, sizeof(scale));
        CHECK_THROWS_AS(device->PackMatrix(m.source(), exact), InvalidArgument);
      }
    }
  }
}

TEST_CASE("a CPU has FP8 only as FP32") {
  const std::unique_ptr<Device> cpu = MakeCpuDevice(1);
  CHECK_FALSE(cpu->capability().has_fp8_weights);
  CHECK(MakeDevice(0, {})->capability().has_fp8_weights);
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 20, 200, 1);
    CHECK_THROWS_AS(cpu->PackMatrix(m.source(), false), InvalidArgument);
    CHECK(cpu->PackMatrix(m.source(), true)->format == MatrixFormat::kF32);
  }
}

TEST_CASE("8-bit activations have the codes and scales of their definition") {
  const std::unique_ptr<Device> device = WithLibrary();
  if (device == nullptr) {
    return;
  }
  for (MatrixFormat format : kFormats) {
    CAPTURE(static_cast<int>(format));
    for (int64_t cols : {64, 77, 320, 1400}) {
      CAPTURE(cols);
      const Layer layer = RandomLayer({format, format}, {48, 32}, cols);
      for (Call call : {Call{kRows, true, false, 0}, Call{kRows + 4, true, true, 4}}) {
        std::vector<float> x = RandomVector(call.num_rows * cols, 5);
        for (size_t i = 0; i < x.size(); ++i) {
          x[i] *= std::ldexp(1.f, static_cast<int>(i / 50 % 9));  // rows and groups differ in size
        }
        const int64_t group = format == MatrixFormat::kFp8 ? cols : 128;
        CheckLayer(layer, Quantized(x, cols, group), Run(*device, layer, x, call), call);
      }
    }
  }
}

TEST_CASE("few rows, odd sizes and deterministic calls keep 16-bit activations") {
  const std::unique_ptr<Device> with = WithLibrary();
  if (with == nullptr) {
    return;
  }
  const std::unique_ptr<Device> deterministic = WithLibrary(true);
  const std::unique_ptr<Device> without = MakeDevice(0, {});
  for (MatrixFormat format : kFormats) {
    CAPTURE(static_cast<int>(format));
    const bool in_groups = format == MatrixFormat::kFp8Block;
    const auto same = [&](Device& device, int num_rows, int64_t outputs) {
      const Layer layer = RandomLayer({format}, {outputs}, 160);
      const std::vector<float> x = RandomVector(num_rows * 160, 6);
      const Call call = {num_rows, true, false, 0};
      return SameBits(Run(device, layer, x, call), Run(*without, layer, x, call));
    };
    CHECK(same(*with, kRows - 1, 32));
    CHECK_FALSE(same(*with, kRows, 32));
    CHECK(same(*with, kRows, 36));  // the library needs multiples of 16
    CHECK(same(*with, kRows + 1, 32) == in_groups);
    CHECK(same(*deterministic, kRows, 32));
  }
}

TEST_CASE("a layer mixes FP8 with other formats") {
  const std::unique_ptr<Device> with = WithLibrary();
  if (with == nullptr) {
    return;
  }
  using enum MatrixFormat;
  const Layer layer =
      RandomLayer({kFp8, kFp8, kQ8_0, kFp8Block, kFp8, kFp8}, {16, 67, 33, 32, 20, 48}, 192);
  const std::vector<float> x = RandomVector(kRows * 192, 7);
  const Call call = {kRows, true, false, 4};
  const std::vector<float> y = Run(*with, layer, x, call);
  const auto stride = static_cast<int64_t>(y.size()) / kRows;
  int64_t first = 0;
  for (size_t i = 0; i < layer.matrices.size(); ++i) {
    CAPTURE(i);
    const Layer alone = {{layer.matrices[i]}, {layer.biases[i]}};
    const std::vector<float> want = Run(*with, alone, x, call);
    const float largest =
        std::abs(*std::ranges::max_element(want, {}, [](float v) { return std::abs(v); }));
    const int64_t outputs = layer.matrices[i].rows;
    for (size_t at = 0; at < want.size(); ++at) {
      const auto row = static_cast<int64_t>(at) / outputs;
      const auto column = first + static_cast<int64_t>(at) % outputs;
      REQUIRE(std::abs(y[static_cast<size_t>(row * stride + column)] - want[at]) <=
              kSumError * largest);
    }
    first += outputs;
  }
}

TEST_CASE("8-bit activations that are NaN or infinite affect only their row") {
  const std::unique_ptr<Device> device = WithLibrary();
  if (device == nullptr) {
    return;
  }
  for (MatrixFormat format : kFormats) {
    const Layer layer = RandomLayer({format}, {32}, 256);
    const std::vector<float> clean = RandomVector(kRows * 256, 8);
    const Call call = {kRows, true, false, 0};
    const std::vector<float> want = Run(*device, layer, clean, call);
    for (float poison : {testing::kNan, testing::kInf, -testing::kInf}) {
      std::vector<float> x = clean;
      x[17 * 256 + 130] = poison;
      const std::vector<float> y = Run(*device, layer, x, call);
      for (size_t i = 0; i < y.size(); ++i) {
        REQUIRE((i / 32 == 17 ? std::isnan(y[i]) : y[i] == want[i]));
      }
    }
  }
}

TEST_CASE("scales of 8-bit activations neither overflow nor vanish") {
  const std::unique_ptr<Device> device = WithLibrary();
  if (device == nullptr) {
    return;
  }
  for (MatrixFormat format : kFormats) {
    Layer layer = RandomLayer({format}, {16}, 128);
    layer.biases = {{}};
    for (float magnitude : {0.f, 1e-44f, 1e-30f, 1e34f}) {
      const std::vector<float> x(kRows * 128, magnitude);
      for (float y : Run(*device, layer, x, {kRows, false, false, 0})) {
        REQUIRE(std::isfinite(y));
        REQUIRE((magnitude > 0 || y == 0));
      }
    }
  }
}

}  // namespace
}  // namespace turbomind::cuda
