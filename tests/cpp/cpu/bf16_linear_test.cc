// Linear layers on AMX tiles in BF16 (isa/amx/bf16_linear.h).
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

constexpr MatrixFormat kFormats[] = {
    MatrixFormat::kBF16,       MatrixFormat::kQ4_0, MatrixFormat::kQ4_1, MatrixFormat::kQ8_0,
    MatrixFormat::kQ4_K,       MatrixFormat::kQ5_K, MatrixFormat::kQ6_K, MatrixFormat::kMxfp4,
    MatrixFormat::kMxfp4Split, MatrixFormat::kNvfp4};
constexpr int kMinRows = 32;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

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

// Rounds to nearest even. Subnormal numbers become zero.
float Rounded(float x) {
  if (!std::isfinite(x)) {
    return x;
  }
  auto bits = std::bit_cast<uint32_t>(x);
  bits = (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits + 0x7fffu + (bits >> 16 & 1);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

// Gives the FP16 number whose upper byte is `upper` an exponent from 2^-11 to 2^-8.
void LimitHalf(uint8_t& upper) { upper = static_cast<uint8_t>((upper & 0x8f) | 0x10); }

// Returns a matrix of random bytes, whose scales have all their bits and are at most 2^-7.
Matrix RandomBytes(MatrixFormat format, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  Matrix m{format, rows, cols, {}, {}};
  const int64_t row_bytes = format == MatrixFormat::kBF16
                                ? 2 * cols
                                : cols / SourceBlockCols(format) * SourceBlockBytes(format);
  m.bytes.resize(static_cast<size_t>(rows * row_bytes));
  std::ranges::generate(m.bytes, [&] { return static_cast<uint8_t>(random()); });
  if (format == MatrixFormat::kMxfp4Split) {
    m.scales.resize(static_cast<size_t>(rows * cols / 32));
    std::ranges::generate(m.scales, [&] { return static_cast<uint8_t>(115 + random() % 16); });
    return m;
  }
  if (format == MatrixFormat::kNvfp4) {
    m.factor = 0x1.9p-16f;  // the largest scale is 480
    return m;
  }
  const auto step =
      static_cast<size_t>(format == MatrixFormat::kBF16 ? 2 : SourceBlockBytes(format));
  for (size_t at = 0; at < m.bytes.size(); at += step) {
    if (format == MatrixFormat::kMxfp4) {
      m.bytes[at] = static_cast<uint8_t>(115 + random() % 16);
    } else if (format == MatrixFormat::kBF16) {
      m.bytes[at + 1] = static_cast<uint8_t>((m.bytes[at + 1] & 0x83) | 0x3c);
    } else if (format == MatrixFormat::kQ6_K) {
      LimitHalf(m.bytes[at + 209]);
    } else {
      LimitHalf(m.bytes[at + 1]);
      if (HasMinimum(format)) {
        LimitHalf(m.bytes[at + 3]);
      }
    }
  }
  return m;
}

// Sets the first scale of an output to the exponent of MXFP4, or to FP16 with this upper byte.
void SetScale(Matrix& m, int64_t output, uint8_t upper) {
  if (m.format == MatrixFormat::kMxfp4Split) {
    m.scales[static_cast<size_t>(output * m.cols / 32)] = upper;
    return;
  }
  const auto row = static_cast<size_t>(output) * m.bytes.size() / static_cast<size_t>(m.rows);
  if (m.format == MatrixFormat::kMxfp4) {
    m.bytes[row] = upper;
    return;
  }
  const size_t at = row + (m.format == MatrixFormat::kQ6_K ? 208 : 0);
  m.bytes[at] = 0;
  m.bytes[at + 1] = upper;
}

// Returns the weights as the kernels round them: [rows, cols].
std::vector<float> RoundedWeights(const Matrix& m) {
  std::vector<float> weights(static_cast<size_t>(m.rows * m.cols));
  for (int64_t o = 0; o < m.rows; ++o) {
    DequantizeMatrixRow(m.source(), o, weights.data() + o * m.cols);
  }
  std::ranges::transform(weights, weights.begin(), Rounded);
  return weights;
}

// Sums of a product: 16 additions for the even and 16 for the odd columns of each 32, both sums
// together, and one addition for each 32 columns. The products are exact.
double TileSumBound(int64_t cols) { return static_cast<double>(cols / 32 + 1 + 18) * 0x1p-24; }

void CheckProduct(const Matrix& m, const std::vector<float>& x, const std::vector<float>& bias,
                  const std::vector<float>& y, Call call) {
  const std::vector<float> weights = RoundedWeights(m);
  for (int64_t r = 0; r < call.num_rows; ++r) {
    const float* row = x.data() + r * (m.cols + kPad);
    for (int64_t o = 0; o < m.rows; ++o) {
      double sum = 0;
      double magnitude = 0;
      for (int64_t c = 0; c < m.cols; ++c) {
        const double product =
            double{weights[static_cast<size_t>(o * m.cols + c)]} * double{Rounded(row[c])};
        sum += product;
        magnitude += std::abs(product);
      }
      const double want = sum + (call.bias ? bias[static_cast<size_t>(o)] : 0.0) +
                          (call.accumulate ? kSentinel : 0.0);
      const double bound = magnitude * TileSumBound(m.cols) + 2 * std::abs(want) * 0x1p-24 +
                           (call.bias ? std::abs(sum) * 0x1p-23 : 0.0) + 1e-37;
      const double got = y[static_cast<size_t>(r * (m.rows + kPad) + o)];
      if (!(std::abs(got - want) <= bound)) {
        FAIL_CHECK("row " << r << " output " << o << ": got " << got << ", want " << want);
        return;
      }
    }
    for (int64_t o = m.rows; o < m.rows + kPad; ++o) {
      REQUIRE(y[static_cast<size_t>(r * (m.rows + kPad) + o)] == kSentinel);
    }
  }
}

// Checks that the products with the rows of the identity are the weights.
void CheckWeights(const Matrix& m) {
  const auto device = MakeBf16Device(2);
  const std::vector<float> weights = RoundedWeights(m);
  std::vector<float> x(static_cast<size_t>(m.cols * (m.cols + kPad)));
  for (int64_t c = 0; c < m.cols; ++c) {
    x[static_cast<size_t>(c * (m.cols + kPad) + c)] = 1.f;  // row c selects column c
  }
  const auto y =
      RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {static_cast<int>(m.cols)});
  CAPTURE(static_cast<int>(m.format));
  for (int64_t c = 0; c < m.cols; ++c) {
    for (int64_t o = 0; o < m.rows; ++o) {
      REQUIRE(y[static_cast<size_t>(c * (m.rows + kPad) + o)] ==
              weights[static_cast<size_t>(o * m.cols + c)]);
    }
  }
}

// Returns row `row` of a result with `rows` outputs.
std::vector<float> RowOf(const std::vector<float>& y, int64_t row, int64_t rows) {
  const auto begin = y.begin() + row * (rows + kPad);
  return {begin, begin + rows};
}

}  // namespace

TEST_CASE("BF16 tiles multiply with the weights of the format, rounded to nearest even") {
  if (!HasAmx()) {
    return;
  }
  for (MatrixFormat format : kFormats) {
    for (int64_t cols : {256, 768}) {
      CheckWeights(RandomBytes(format, 37, cols, static_cast<uint32_t>(cols)));
    }
  }
}

TEST_CASE("BF16 tiles multiply with every finite power of two of MXFP4") {
  if (!HasAmx()) {
    return;
  }
  for (MatrixFormat format : {MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split}) {
    Matrix m = RandomBytes(format, 253, 32, 1);
    for (int e = 0; e < 253; ++e) {
      SetScale(m, e, static_cast<uint8_t>(e));
    }
    CheckWeights(m);
  }
}

TEST_CASE("products on BF16 tiles agree with a double reference for every shape") {
  if (!HasAmx()) {
    return;
  }
  const auto device = MakeBf16Device(2);
  for (MatrixFormat format : kFormats) {
    const std::vector<int64_t> columns =
        format == MatrixFormat::kBF16  ? std::vector<int64_t>{1, 31, 66, 1055}
        : SourceBlockCols(format) > 32 ? std::vector<int64_t>{256, 1280}
                                       : std::vector<int64_t>{32, 96, 1056};
    for (int64_t cols : columns) {
      for (int64_t rows : {1, 32, 37}) {
        const Matrix m = RandomBytes(format, rows, cols, static_cast<uint32_t>(rows + cols));
        std::vector<float> x = RandomVector(95 * (cols + kPad), 7);
        for (int64_t r = 0; r < 95; ++r) {  // columns past the end must not be read
          std::fill_n(x.begin() + r * (cols + kPad) + cols, kPad, kNan);
        }
        const std::vector<float> bias = RandomVector(rows, 8);
        const auto weight = device->PackMatrix(m.source(), false);
        CAPTURE(static_cast<int>(format));
        CAPTURE(rows);
        CAPTURE(cols);
        for (Call call : {Call{32, false, false}, Call{33, true, false}, Call{48, false, true},
                          Call{49, true, true}, Call{64, true, false}, Call{95, false, true}}) {
          CAPTURE(call.num_rows);
          CheckProduct(m, x, bias, RunLinear(*device, *weight, x, bias, call), call);
        }
      }
    }
  }
}

TEST_CASE("a row on BF16 tiles has the same bits in every batch of 32 rows or more") {
  if (!HasAmx()) {
    return;
  }
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomBytes(format, 203, 768, 3);
    const int64_t stride = m.cols + kPad;
    const std::vector<float> x = RandomVector(95 * stride, 4);
    const std::vector<float> bias = RandomVector(m.rows, 5);
    const auto single = MakeBf16Device(1);
    const auto want =
        RunLinear(*single, *single->PackMatrix(m.source(), false), x, bias, {95, true, true});
    for (int threads : {1, 2, 5}) {
      const auto device = MakeBf16Device(threads);
      const auto weight = device->PackMatrix(m.source(), false);
      CAPTURE(static_cast<int>(format));
      CAPTURE(threads);
      for (int num_rows : {32, 49, 95}) {
        CAPTURE(num_rows);
        std::vector<float> moved(static_cast<size_t>(num_rows * stride));
        for (int64_t r = 0; r < num_rows; ++r) {
          std::copy_n(x.begin() + r * 37 % 95 * stride, stride, moved.begin() + r * stride);
        }
        const auto y = RunLinear(*device, *weight, moved, bias, {num_rows, true, true});
        for (int64_t r = 0; r < num_rows; ++r) {
          REQUIRE(SameBits(RowOf(y, r, m.rows), RowOf(want, r * 37 % 95, m.rows)));
        }
      }
    }
  }
}

TEST_CASE("a row on BF16 tiles has the same bits in several row blocks and groups of outputs") {
  if (!HasAmx()) {
    return;
  }
  const Matrix m = RandomBytes(MatrixFormat::kQ4_0, 400, 1024, 11);
  const int64_t stride = m.cols + kPad;
  const std::vector<float> x = RandomVector(800 * stride, 12);
  const auto device = MakeBf16Device(1);
  const auto weight = device->PackMatrix(m.source(), false);
  const auto all = RunLinear(*device, *weight, x, {}, {800});
  for (int64_t first : {0, 390, 768}) {
    const std::vector<float> some(x.begin() + first * stride, x.begin() + (first + 32) * stride);
    const auto y = RunLinear(*device, *weight, some, {}, {32});
    for (int64_t r = 0; r < 32; ++r) {
      REQUIRE(SameBits(RowOf(y, r, m.rows), RowOf(all, first + r, m.rows)));
    }
  }
}

TEST_CASE("fewer than 32 rows have the bits of a deterministic device, and so have F32 weights") {
  if (!HasAmx()) {
    return;
  }
  const auto plain = MakeCpuDevice(2, "avx512");
  const auto device = MakeBf16Device(2);
  const std::vector<float> x = RandomVector(40 * (256 + kPad), 4);
  const auto check = [&](const Matrix& m, int num_rows) {
    CAPTURE(static_cast<int>(m.format));
    CAPTURE(num_rows);
    const auto want = RunLinear(*plain, *plain->PackMatrix(m.source(), false), x, {}, {num_rows});
    const auto y = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {num_rows});
    CHECK(SameBits(y, want));
  };
  for (MatrixFormat format : kFormats) {
    for (int num_rows : {1, 12, 13, 31}) {
      check(RandomBytes(format, 50, 256, 6), num_rows);
    }
  }
  check(RandomMatrix(MatrixFormat::kF32, 50, 256, 6), 40);
}

TEST_CASE("devices that are deterministic or round activations to 8 bits do not use BF16 tiles") {
  if (!HasAmx()) {
    return;
  }
  const std::vector<float> x = RandomVector(40 * (256 + kPad), 4);
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomBytes(format, 50, 256, 6);
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

TEST_CASE("rows grouped by weight use BF16 tiles where a weight has 32 rows") {
  if (!HasAmx()) {
    return;
  }
  constexpr int32_t kRows = 130;
  const std::vector<int32_t> offsets = {0, 33, 64, 64, 130};  // 33, 31, 0 and 66 rows
  const auto device = MakeBf16Device(2);
  const auto plain = MakeCpuDevice(2, "amx");
  for (MatrixFormat format : kFormats) {
    const std::vector<float> x = RandomVector(kRows * (256 + kPad), 61);
    std::vector<int32_t> x_rows(kRows);
    for (int32_t row = 0; row < kRows; ++row) {
      x_rows[static_cast<size_t>(row)] = row * 37 % kRows;
    }
    std::vector<std::unique_ptr<PackedMatrix>> weights;
    std::vector<LinearPart> experts;
    std::vector<float> y(kRows * (50 + kPad), kSentinel);
    std::vector<float> want = y;
    for (uint32_t i = 0; i < 4; ++i) {
      weights.push_back(device->PackMatrix(RandomBytes(format, 50, 256, i).source(), false));
      experts.push_back({weights.back().get(), nullptr});
      Device& own = offsets[i + 1] - offsets[i] >= kMinRows ? *device : *plain;
      const auto all = RunLinear(own, *weights.back(), x, {}, {kRows});
      for (int32_t r = offsets[i]; r < offsets[i + 1]; ++r) {
        std::copy_n(all.begin() + x_rows[static_cast<size_t>(r)] * (50 + kPad), 50,
                    want.begin() + r * (50 + kPad));
      }
    }
    device->GroupedLinear({.x = x.data(),
                           .x_stride = 256 + kPad,
                           .x_rows = x_rows.data(),
                           .y = y.data(),
                           .y_stride = 50 + kPad,
                           .experts = experts.data(),
                           .num_experts = 4,
                           .offsets = offsets.data(),
                           .num_rows = kRows});
    CAPTURE(static_cast<int>(format));
    CHECK(SameBits(y, want));
  }
}

TEST_CASE("matrices of several formats on BF16 tiles share a layer") {
  if (!HasAmx()) {
    return;
  }
  const auto device = MakeBf16Device(2);
  std::vector<Matrix> matrices;
  for (MatrixFormat format : kFormats) {
    matrices.push_back(RandomBytes(format, 40, 256, 1));
    matrices.push_back(RandomBytes(format, 7, 256, 2));
  }
  matrices.push_back(RandomMatrix(MatrixFormat::kF32, 20, 256, 3));
  CheckPartsShareALayer(*device, matrices);
}

TEST_CASE("NaN, infinite and huge activations on BF16 tiles affect only their row") {
  if (!HasAmx()) {
    return;
  }
  const auto device = MakeBf16Device(1);
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomBytes(format, 40, 256, 21);
    const auto weight = device->PackMatrix(m.source(), false);
    const std::vector<float> clean = RandomVector(40 * (m.cols + kPad), 22);
    const auto want = RunLinear(*device, *weight, clean, {}, {40});
    for (float poison : {kNan, kInf, -kInf, std::numeric_limits<float>::max()}) {
      for (int64_t row : {0, 17, 39}) {
        std::vector<float> x = clean;
        x[static_cast<size_t>(row * (m.cols + kPad) + 33)] = poison;
        const auto y = RunLinear(*device, *weight, x, {}, {40});
        for (int64_t r = 0; r < 40; ++r) {
          const auto outputs = RowOf(y, r, m.rows);
          if (r != row) {
            REQUIRE(SameBits(outputs, RowOf(want, r, m.rows)));
          } else {
            REQUIRE(std::ranges::none_of(outputs, [](float v) { return std::isfinite(v); }));
          }
        }
      }
    }
  }
}

TEST_CASE("a scale that is NaN or infinite affects only its output on BF16 tiles") {
  if (!HasAmx()) {
    return;
  }
  const auto device = MakeBf16Device(1);
  for (MatrixFormat format : kFormats) {
    if (format == MatrixFormat::kBF16 || format == MatrixFormat::kNvfp4) {
      continue;  // without scales, or with numbers alone
    }
    const Matrix clean = RandomBytes(format, 40, 256, 21);
    const std::vector<float> x = RandomVector(40 * (256 + kPad), 22);
    const auto want = RunLinear(*device, *device->PackMatrix(clean.source(), false), x, {}, {40});
    for (int upper : {0x7c, 0x7e, 0xfc}) {
      Matrix m = clean;
      SetScale(m, 5, static_cast<uint8_t>(IsMxfp4(format) ? 255 : upper));
      const auto y = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {40});
      for (size_t i = 0; i < y.size(); ++i) {
        if (i % (40 + kPad) == 5) {
          REQUIRE(!std::isfinite(y[i]));
        } else {
          REQUIRE(y[i] == want[i]);
        }
      }
    }
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
