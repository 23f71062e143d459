#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"

using namespace turbomind;

namespace {

constexpr MatrixFormat kFormats[] = {MatrixFormat::kF32, MatrixFormat::kBF16, MatrixFormat::kQ4_0,
                                     MatrixFormat::kQ4_1, MatrixFormat::kQ8_0};
constexpr float kSentinel = 12345.f;
constexpr int kPad = 3;  // floats between the rows of x and of y

// FP32 sums in a fixed order: n roundings of at most 2^-24 of the sum of magnitudes.
double SumBound(int64_t cols) { return (cols + 8) * 0x1p-24; }
// A 16-bit activation is off by at most one and a half steps of amax / 32512 (half from rounding,
// one where a low half of -128 is moved to -127), plus FP32 rounding of the scale.
constexpr double kActivationError = 1.5 / 32512 * (1 + 1e-5);
constexpr double kBF16Rounding = 0x1p-8;  // 8 significant bits, round to nearest

struct Matrix {
  MatrixFormat format = MatrixFormat::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<uint8_t> bytes;  // as in a checkpoint
  std::vector<double> values;  // what they mean
  MatrixSource source() const { return {format, bytes.data(), rows, cols}; }
};

// FP16 of a value that has few bits: exact.
uint16_t Half(double value) {
  int exponent;
  const double mantissa = std::frexp(std::abs(value), &exponent);
  const auto bits =
      static_cast<uint16_t>((exponent + 14) << 10 | static_cast<int>(mantissa * 2048) % 1024);
  return value < 0 ? bits | 0x8000 : bits;
}

template <class V>
void Append(std::vector<uint8_t>& bytes, V value) {
  const auto* p = reinterpret_cast<const uint8_t*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof(value));
}

void AppendBlock(Matrix& m, std::mt19937& random) {
  const double d = (static_cast<int>(random() % 255) - 127) / 4096.0 + 0x1p-14;
  const double min = (static_cast<int>(random() % 255) - 127) / 2048.0 + 0x1p-14;
  Append(m.bytes, Half(d));
  if (m.format == MatrixFormat::kQ8_0) {
    for (int c = 0; c < 32; ++c) {
      const auto code = static_cast<int8_t>(random());  // -128 too
      Append(m.bytes, code);
      m.values.push_back(d * code);
    }
    return;
  }
  const bool has_min = m.format == MatrixFormat::kQ4_1;
  if (has_min) {
    Append(m.bytes, Half(min));
  }
  uint8_t codes[32];
  for (uint8_t& code : codes) {
    code = random() % 16;
    m.values.push_back(has_min ? d * code + min : d * (code - 8));
  }
  for (int c = 0; c < 16; ++c) {
    m.bytes.push_back(static_cast<uint8_t>(codes[c] | codes[c + 16] << 4));
  }
}

Matrix RandomMatrix(MatrixFormat format, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Matrix m{format, rows, cols, {}, {}};
  if (format == MatrixFormat::kF32 || format == MatrixFormat::kBF16) {
    for (int64_t i = 0; i < rows * cols; ++i) {
      float value = normal(random);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (format == MatrixFormat::kBF16) {
        bits &= 0xffff0000u;
        std::memcpy(&value, &bits, 4);
        Append(m.bytes, static_cast<uint16_t>(bits >> 16));
      } else {
        Append(m.bytes, value);
      }
      m.values.push_back(value);
    }
    return m;
  }
  for (int64_t i = 0; i < rows * cols / 32; ++i) {
    AppendBlock(m, random);
  }
  return m;
}

std::vector<float> RandomVector(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(size));
  for (float& value : x) {
    value = normal(random);
  }
  return x;
}

struct Call {
  int num_rows = 1;
  bool bias = false;
  bool accumulate = false;
};

// x rows are `cols + kPad` floats apart; y is filled with the sentinel first.
std::vector<float> RunLinear(Device& device, const PackedMatrix& weight,
                             const std::vector<float>& x, const std::vector<float>& bias,
                             Call call) {
  const int64_t stride = weight.rows + kPad;
  std::vector<float> y(static_cast<size_t>(call.num_rows * stride), kSentinel);
  LinearParams params;
  params.x = x.data();
  params.x_stride = weight.cols + kPad;
  params.weight = &weight;
  params.bias = call.bias ? bias.data() : nullptr;
  params.y = y.data();
  params.y_stride = stride;
  params.num_rows = call.num_rows;
  params.accumulate = call.accumulate;
  device.Linear(params);
  return y;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// How far output (row, o) may be from the exact product with these values.
double Bound(const Matrix& m, const float* x, int64_t o, bool exact) {
  double magnitude = 0;
  double rounding = 0;
  for (int64_t c = 0; c < m.cols; ++c) {
    const double w = std::abs(m.values[static_cast<size_t>(o * m.cols + c)]);
    // Q4_1 adds d · code and the minimum apart: their magnitudes count, not the sum's.
    magnitude += (w + (m.format == MatrixFormat::kQ4_1 ? 1.0 : 0.0)) * std::abs(x[c]);
    if (exact || m.format == MatrixFormat::kF32) {
      continue;
    }
    if (m.format == MatrixFormat::kBF16) {
      rounding += w * std::abs(x[c]) * kBF16Rounding;
    } else {
      const float* block = x + c / 32 * 32;
      double amax = 0;
      for (int i = 0; i < 32; ++i) {
        amax = std::max<double>(amax, std::abs(block[i]));
      }
      rounding += w * amax * kActivationError;
    }
  }
  return rounding + magnitude * SumBound(m.cols) + 1e-6;
}

void CheckAgainstDouble(const Matrix& m, const std::vector<float>& x,
                        const std::vector<float>& bias, const std::vector<float>& y, Call call,
                        bool exact) {
  for (int r = 0; r < call.num_rows; ++r) {
    const float* row = x.data() + r * (m.cols + kPad);
    for (int64_t o = 0; o < m.rows; ++o) {
      double want =
          (call.bias ? bias[static_cast<size_t>(o)] : 0.0) + (call.accumulate ? kSentinel : 0.0);
      for (int64_t c = 0; c < m.cols; ++c) {
        want += m.values[static_cast<size_t>(o * m.cols + c)] * row[c];
      }
      const double got = y[static_cast<size_t>(r * (m.rows + kPad) + o)];
      const double rounding = std::abs(want) * 0x1p-22;
      if (!(std::abs(got - want) <= Bound(m, row, o, exact) + rounding)) {
        FAIL_CHECK("row " << r << " output " << o << ": got " << got << ", want " << want);
        return;
      }
    }
    for (int64_t o = m.rows; o < m.rows + kPad; ++o) {
      REQUIRE(y[static_cast<size_t>(r * (m.rows + kPad) + o)] == kSentinel);
    }
  }
}

}  // namespace

TEST_CASE("every format and shape agrees with a double reference on every instruction set") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(2, isa);
    for (MatrixFormat format : kFormats) {
      const bool quantized = format >= MatrixFormat::kQ4_0;
      for (int64_t rows : {1, 16, 37, 130}) {
        for (int64_t cols :
             quantized ? std::vector<int64_t>{32, 96} : std::vector<int64_t>{1, 77}) {
          const Matrix m = RandomMatrix(format, rows, cols, static_cast<uint32_t>(rows + cols));
          const std::vector<float> x = RandomVector(70 * (cols + kPad), 7);
          const std::vector<float> bias = RandomVector(rows, 8);
          for (bool exact : {false, true}) {
            const auto weight = device->PackMatrix(m.source(), exact);
            CAPTURE(isa);
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

TEST_CASE("a row has the same bits for every number of rows, threads and instruction set") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 203, 320, 3);
    const std::vector<float> x = RandomVector(70 * (m.cols + kPad), 4);
    const std::vector<float> bias = RandomVector(m.rows, 5);
    const auto reference_device = MakeCpuDevice(1, "scalar");
    const auto reference_weight = reference_device->PackMatrix(m.source(), false);
    const std::vector<float> want =
        RunLinear(*reference_device, *reference_weight, x, bias, {70, true, true});
    for (const std::string& isa : AvailableCpuIsas()) {
      for (int threads : {1, 2, 5}) {
        const auto device = MakeCpuDevice(threads, isa);
        const auto weight = device->PackMatrix(m.source(), false);
        for (int num_rows = 1; num_rows <= 70; num_rows += isa == "scalar" ? 23 : 1) {
          CAPTURE(isa);
          CAPTURE(threads);
          CAPTURE(num_rows);
          const auto y = RunLinear(*device, *weight, x, bias, {num_rows, true, true});
          const auto length = static_cast<int64_t>(y.size());
          REQUIRE(SameBits(y, {want.begin(), want.begin() + length}));
        }
      }
    }
  }
}

TEST_CASE("a long matrix gives a row the same bits whatever is computed beside it") {
  const auto device = MakeCpuDevice(2);
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 100, 2048, 11);  // several row blocks
    const std::vector<float> x = RandomVector(300 * (m.cols + kPad), 12);
    const auto weight = device->PackMatrix(m.source(), false);
    const auto all = RunLinear(*device, *weight, x, {}, {300});
    for (int row : {0, 11, 12, 133, 299}) {
      const std::vector<float> one(x.begin() + row * (m.cols + kPad),
                                   x.begin() + (row + 1) * (m.cols + kPad));
      const auto y = RunLinear(*device, *weight, one, {}, {1});
      const auto begin = all.begin() + row * (m.rows + kPad);
      CHECK(SameBits(y, {begin, begin + m.rows + kPad}));
    }
  }
}

TEST_CASE("NaN and infinite activations reach the outputs of their row and no other") {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(1, isa);
    for (MatrixFormat format : kFormats) {
      const Matrix m = RandomMatrix(format, 40, 64, 21);
      const auto weight = device->PackMatrix(m.source(), false);
      const std::vector<float> clean = RandomVector(3 * (m.cols + kPad), 22);
      const auto want = RunLinear(*device, *weight, clean, {}, {3});
      for (float poison : {kNaN, kInf, -kInf}) {
        std::vector<float> x = clean;
        x[static_cast<size_t>(m.cols + kPad + 33)] = poison;
        const auto y = RunLinear(*device, *weight, x, {}, {3});
        const auto stride = static_cast<size_t>(m.rows + kPad);
        for (size_t o = 0; o < static_cast<size_t>(m.rows); ++o) {
          REQUIRE(y[o] == want[o]);
          REQUIRE(y[2 * stride + o] == want[2 * stride + o]);
          REQUIRE(!std::isfinite(y[stride + o]));
        }
      }
    }
  }
}

TEST_CASE("zero, tiny and huge activations do not overflow the scale of 16 bits") {
  const auto device = MakeCpuDevice(1);
  const Matrix m = RandomMatrix(MatrixFormat::kQ8_0, 16, 32, 31);
  const auto weight = device->PackMatrix(m.source(), false);
  for (float magnitude : {0.f, 1e-44f, 1e-37f, 1e-30f, 1e34f}) {
    std::vector<float> x(static_cast<size_t>(m.cols + kPad), magnitude);
    const auto y = RunLinear(*device, *weight, x, {}, {1});
    for (int64_t o = 0; o < m.rows; ++o) {
      REQUIRE(std::isfinite(y[static_cast<size_t>(o)]));
      if (magnitude == 0.f) {
        REQUIRE(y[static_cast<size_t>(o)] == 0.f);
      }
    }
  }
}

TEST_CASE("embedding rows come back exactly from the packed matrix") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 50, 96, 41);
    for (bool exact : {false, true}) {
      const auto device = MakeCpuDevice(2);
      const auto table = device->PackMatrix(m.source(), exact);
      std::vector<int32_t> ids = {49, 0, 17, 17, 31};
      std::vector<float> out(ids.size() * 96, kSentinel);
      device->Embed({table.get(), ids.data(), out.data(), static_cast<int>(ids.size())});
      for (size_t i = 0; i < ids.size(); ++i) {
        for (size_t c = 0; c < 96; ++c) {
          const double want = m.values[static_cast<size_t>(ids[i]) * 96 + c];
          REQUIRE(std::abs(out[i * 96 + c] - want) <= std::abs(want) * 0x1p-23);
        }
      }
      ids[2] = 50;
      CHECK_THROWS_AS(
          device->Embed({table.get(), ids.data(), out.data(), static_cast<int>(ids.size())}),
          InvalidArgument);
    }
  }
}

TEST_CASE("matrices that cannot be packed are refused") {
  const auto device = MakeCpuDevice(1);
  std::vector<uint8_t> bytes(4096);
  CHECK_THROWS_AS(device->PackMatrix({MatrixFormat::kQ4_0, bytes.data(), 4, 40}, false),
                  InvalidArgument);
  CHECK_THROWS_AS(device->PackMatrix({MatrixFormat::kF32, bytes.data(), 0, 32}, false),
                  InvalidArgument);
  CHECK_THROWS_AS(device->PackMatrix({MatrixFormat::kF32, nullptr, 4, 32}, false), InvalidArgument);
}
