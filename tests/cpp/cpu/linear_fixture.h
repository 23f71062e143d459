#pragma once

// Random matrices of every format with their exact values, and helpers shared by the tests of
// linear layers.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "turbomind/ops/device.h"
#include "turbomind/ops/matrix_source.h"

namespace turbomind::testing {

inline constexpr float kSentinel = 12345.f;
inline constexpr int kPad = 3;  // floats between the rows of x and between those of y

// FP32 sums in a fixed order: n roundings of at most 2^-24 of the sum of magnitudes.
inline double SumBound(int64_t cols) { return (cols + 8) * 0x1p-24; }
// A 16-bit activation is off by at most one and a half steps of amax / 32512, plus the FP32
// rounding of the scale. Half a step comes from rounding; one step comes from changing a low half
// of -128 to -127.
inline constexpr double kActivationError = 1.5 / 32512 * (1 + 1e-5);
inline constexpr double kBF16Rounding = 0x1p-8;  // 8 significant bits, round to nearest

struct Matrix {
  MatrixFormat format = MatrixFormat::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<uint8_t> bytes;        // as stored in a checkpoint
  std::vector<double> values;        // their exact values
  std::vector<uint8_t> scales = {};  // kMxfp4Split
  float factor = 1.f;                // kNvfp4
  MatrixSource source() const {
    return {format, bytes.data(), rows, cols, scales.empty() ? nullptr : scales.data(), factor};
  }
};

// Returns the FP16 bits of a value that has few significant bits. The conversion is exact.
inline uint16_t Half(double value) {
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

inline void AppendBlock(Matrix& m, std::mt19937& random) {
  const double d = (static_cast<int>(random() % 255) - 127) / 4096.0 + 0x1p-14;
  const double min = (static_cast<int>(random() % 255) - 127) / 2048.0 + 0x1p-14;
  Append(m.bytes, Half(d));
  if (m.format == MatrixFormat::kQ8_0) {
    for (int c = 0; c < 32; ++c) {
      const auto code = static_cast<int8_t>(random());  // includes -128
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

// Appends one block of MXFP4 in the matrix's form.
inline void AppendMxfp4Block(Matrix& m, int exponent, const uint8_t (&codes)[32]) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (uint8_t code : codes) {
    const double magnitude = std::ldexp(kValues[code % 8], exponent - 127);
    m.values.push_back(code < 8 ? magnitude : -magnitude);
  }
  const bool split = m.format == MatrixFormat::kMxfp4Split;
  (split ? m.scales : m.bytes).push_back(static_cast<uint8_t>(exponent));
  for (int j = 0; j < 16; ++j) {
    const int low = codes[split ? 2 * j : j];
    const int high = codes[split ? 2 * j + 1 : 16 + j];
    m.bytes.push_back(static_cast<uint8_t>(low | high << 4));
  }
}

// Returns a random MXFP4 matrix, whose values are the same in both forms.
inline Matrix RandomMxfp4(MatrixFormat format, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  Matrix m{format, rows, cols, {}, {}};
  for (int64_t i = 0; i < rows * cols / 32; ++i) {
    uint8_t codes[32];
    for (uint8_t& code : codes) {
      code = static_cast<uint8_t>(random() % 16);
    }
    AppendMxfp4Block(m, 115 + static_cast<int>(random() % 16), codes);
  }
  return m;
}

// Writes 8 scales and 8 minima of 6 bits as 12 bytes: those of 0 to 3, whose upper bits hold the
// upper bits of 4 to 7, then the lower nibbles of 4 to 7.
inline void AppendSixBits(Matrix& m, const uint8_t (&scales)[8], const uint8_t (&minima)[8]) {
  for (const auto* of : {&scales, &minima}) {
    for (int i = 0; i < 4; ++i) {
      m.bytes.push_back(static_cast<uint8_t>((*of)[i] | (*of)[4 + i] >> 4 << 6));
    }
  }
  for (int i = 4; i < 8; ++i) {
    m.bytes.push_back(static_cast<uint8_t>((scales[i] & 15) | (minima[i] & 15) << 4));
  }
}

// Writes the nibbles of 256 codes: a byte holds those of a column and of the one `distance` columns
// later.
inline void AppendNibbles(Matrix& m, const uint8_t (&codes)[256], int distance) {
  for (int i = 0; i < 128; ++i) {
    const int column = i / distance * 2 * distance + i % distance;
    m.bytes.push_back(
        static_cast<uint8_t>((codes[column] & 15) | (codes[column + distance] & 15) << 4));
  }
}

// Writes the bits of 256 codes above the lowest four: `bits` from each of the columns that are 32
// columns apart.
inline void AppendUpperBits(Matrix& m, const uint8_t (&codes)[256], int bits) {
  const int columns = 32 * 8 / bits;
  for (int first = 0; first < 256; first += columns) {
    for (int i = 0; i < 32; ++i) {
      int byte = 0;
      for (int k = 0; k < 8 / bits; ++k) {
        byte |= codes[first + 32 * k + i] >> 4 << (bits * k);
      }
      m.bytes.push_back(static_cast<uint8_t>(byte));
    }
  }
}

// Returns a random number of 8 bits from `from` to 2 * from, or the negative of one.
inline double RandomFactor(std::mt19937& random, double from) {
  const double magnitude = from * (128 + static_cast<int>(random() % 128)) / 128;
  return random() % 2 == 0 ? magnitude : -magnitude;
}

inline void AppendQ6SuperBlock(Matrix& m, std::mt19937& random) {
  const double d = RandomFactor(random, 0x1p-14);
  int8_t scales[16];
  uint8_t codes[256];
  for (int8_t& scale : scales) {
    scale = static_cast<int8_t>(random());  // includes -128
  }
  for (int c = 0; c < 256; ++c) {
    codes[c] = random() % 64;
    m.values.push_back(d * scales[c / 16] * (codes[c] - 32));
  }
  AppendNibbles(m, codes, 64);
  AppendUpperBits(m, codes, 2);
  for (int8_t scale : scales) {
    m.bytes.push_back(static_cast<uint8_t>(scale));
  }
  Append(m.bytes, Half(d));
}

// Appends a super-block whose random scales give values and minima of at most 1.
inline void AppendSuperBlock(Matrix& m, std::mt19937& random) {
  if (m.format == MatrixFormat::kQ6_K) {
    return AppendQ6SuperBlock(m, random);
  }
  const bool five = m.format == MatrixFormat::kQ5_K;
  const double d = RandomFactor(random, 0x1p-14);
  const double min = RandomFactor(random, 0x1p-8);
  uint8_t scales[8];
  uint8_t minima[8];
  uint8_t codes[256];
  for (int i = 0; i < 8; ++i) {
    scales[i] = random() % 64;
    minima[i] = random() % 64;
  }
  for (int c = 0; c < 256; ++c) {
    codes[c] = random() % (five ? 32 : 16);
    m.values.push_back(d * scales[c / 32] * codes[c] - min * minima[c / 32]);
  }
  Append(m.bytes, Half(d));
  Append(m.bytes, Half(min));
  AppendSixBits(m, scales, minima);
  if (five) {
    AppendUpperBits(m, codes, 1);
  }
  AppendNibbles(m, codes, 32);
}

// Returns a random NVFP4 matrix, whose values have at most 13 bits. Every number is a scale.
inline Matrix RandomNvfp4(int64_t rows, int64_t cols, uint32_t seed) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::mt19937 random(seed);
  Matrix m{MatrixFormat::kNvfp4, rows, cols, {}, {}, {}, 0x1.23p-12f};
  for (int64_t i = 0; i < rows * cols / kNvBlock; ++i) {
    uint8_t codes[kNvBlock];
    uint8_t scales[4];
    for (uint8_t& scale : scales) {
      scale = static_cast<uint8_t>(random() % 0x7f);
      m.bytes.push_back(scale);
    }
    for (int c = 0; c < kNvBlock; ++c) {
      codes[c] = static_cast<uint8_t>(random() % 16);
      const uint8_t scale = scales[c / 16];
      const double step =
          scale < 8 ? std::ldexp(scale, -9) : std::ldexp(8 + scale % 8, scale / 8 - 10);
      const double magnitude = kValues[codes[c] % 8] * step * double{m.factor};
      m.values.push_back(codes[c] < 8 ? magnitude : -magnitude);
    }
    for (int j = 0; j < 32; ++j) {
      const uint8_t* low = codes + j / 8 * 16 + j % 8;
      m.bytes.push_back(static_cast<uint8_t>(low[0] | low[8] << 4));
    }
  }
  return m;
}

inline Matrix RandomMatrix(MatrixFormat format, int64_t rows, int64_t cols, uint32_t seed) {
  if (IsMxfp4(format)) {
    return RandomMxfp4(format, rows, cols, seed);
  }
  if (format == MatrixFormat::kNvfp4) {
    return RandomNvfp4(rows, cols, seed);
  }
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
  for (int64_t i = 0; i < rows * cols / SourceBlockCols(format); ++i) {
    if (IsKQuant(format)) {
      AppendSuperBlock(m, random);
    } else {
      AppendBlock(m, random);
    }
  }
  return m;
}

inline std::vector<float> RandomVector(int64_t size, uint32_t seed) {
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

// Runs one linear layer. The rows of x are `cols + kPad` floats apart. y is filled with the
// sentinel first.
inline std::vector<float> RunLinear(Device& device, const PackedMatrix& weight,
                                    const std::vector<float>& x, const std::vector<float>& bias,
                                    Call call) {
  const int64_t stride = weight.rows + kPad;
  std::vector<float> y(static_cast<size_t>(call.num_rows * stride), kSentinel);
  const LinearPart part = {&weight, call.bias ? bias.data() : nullptr};
  LinearParams params;
  params.x = x.data();
  params.x_stride = weight.cols + kPad;
  params.parts = &part;
  params.num_parts = 1;
  params.y = y.data();
  params.y_stride = stride;
  params.num_rows = call.num_rows;
  params.accumulate = call.accumulate;
  device.Linear(params);
  return y;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Returns the largest allowed error of output (row, o) against the exact product with these values.
inline double Bound(const Matrix& m, const float* x, int64_t o, bool exact) {
  double magnitude = 0;
  double rounding = 0;
  for (int64_t c = 0; c < m.cols; ++c) {
    const double w = std::abs(m.values[static_cast<size_t>(o * m.cols + c)]);
    // The scaled code and the minimum are added separately, so their magnitudes count instead of
    // the sum's.
    magnitude += (w + (HasMinimum(m.format) ? 1.0 : 0.0)) * std::abs(x[c]);
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

inline void CheckAgainstDouble(const Matrix& m, const std::vector<float>& x,
                               const std::vector<float>& bias, const std::vector<float>& y,
                               Call call, bool exact) {
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

// Checks that NaN and infinite activations make all outputs of their row non-finite, and no others.
// The matrix must have more than 33 columns.
inline void CheckPoisonStaysInItsRow(Device& device, const Matrix& m) {
  const auto weight = device.PackMatrix(m.source(), false);
  const std::vector<float> clean = RandomVector(3 * (m.cols + kPad), 22);
  const auto want = RunLinear(device, *weight, clean, {}, {3});
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (float poison : {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf}) {
    std::vector<float> x = clean;
    x[static_cast<size_t>(m.cols + kPad + 33)] = poison;
    const auto y = RunLinear(device, *weight, x, {}, {3});
    const auto stride = static_cast<size_t>(m.rows + kPad);
    for (size_t o = 0; o < static_cast<size_t>(m.rows); ++o) {
      REQUIRE(y[o] == want[o]);
      REQUIRE(y[2 * stride + o] == want[2 * stride + o]);
      REQUIRE(!std::isfinite(y[stride + o]));
    }
  }
}

// Checks that matrices with the same number of columns give the bits in one layer that each gives
// alone.
inline void CheckPartsShareALayer(Device& device, const std::vector<Matrix>& matrices) {
  const int64_t cols = matrices[0].cols;
  const std::vector<float> x = RandomVector(40 * (cols + kPad), 41);
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<LinearPart> parts;
  int64_t stride = kPad;
  for (const Matrix& m : matrices) {
    weights.push_back(device.PackMatrix(m.source(), false));
    parts.push_back({weights.back().get(), nullptr});
    stride += m.rows;
  }
  for (int num_rows : {1, 12, 30, 40}) {
    std::vector<float> y(static_cast<size_t>(num_rows * stride), kSentinel);
    device.Linear({.x = x.data(),
                   .x_stride = cols + kPad,
                   .parts = parts.data(),
                   .num_parts = static_cast<int>(parts.size()),
                   .y = y.data(),
                   .y_stride = stride,
                   .num_rows = num_rows});
    int64_t first = 0;
    for (const auto& weight : weights) {
      const auto alone = RunLinear(device, *weight, x, {}, {num_rows});
      for (int64_t r = 0; r < num_rows; ++r) {
        const auto begin = y.begin() + r * stride + first;
        const auto own = alone.begin() + r * (weight->rows + kPad);
        REQUIRE(SameBits({begin, begin + weight->rows}, {own, own + weight->rows}));
      }
      first += weight->rows;
    }
  }
}

// Checks that rows grouped by three weights have the bits that each row has alone.
inline void CheckGroupedRows(Device& device, MatrixFormat format) {
  constexpr int kRows = 40;
  const std::vector<int32_t> offsets = {0, 1, 14, 40};
  const std::vector<float> x = RandomVector(kRows * (256 + kPad), 61);
  std::vector<int32_t> x_rows(kRows);
  for (int32_t row = 0; row < kRows; ++row) {
    x_rows[static_cast<size_t>(row)] = row * 37 % kRows;
  }
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<LinearPart> experts;
  std::vector<float> y(kRows * (50 + kPad), kSentinel);
  std::vector<float> want = y;
  for (uint32_t i = 0; i < 3; ++i) {
    weights.push_back(device.PackMatrix(RandomMatrix(format, 50, 256, i).source(), false));
    experts.push_back({weights.back().get(), nullptr});
    const auto alone = RunLinear(device, *weights.back(), x, {}, {kRows});
    for (int r = offsets[i]; r < offsets[i + 1]; ++r) {
      std::copy_n(alone.begin() + x_rows[static_cast<size_t>(r)] * (50 + kPad), 50,
                  want.begin() + r * (50 + kPad));
    }
  }
  device.GroupedLinear({.x = x.data(),
                        .x_stride = 256 + kPad,
                        .x_rows = x_rows.data(),
                        .y = y.data(),
                        .y_stride = 50 + kPad,
                        .experts = experts.data(),
                        .num_experts = 3,
                        .offsets = offsets.data(),
                        .num_rows = kRows});
  CHECK(SameBits(y, want));
}

}  // namespace turbomind::testing
