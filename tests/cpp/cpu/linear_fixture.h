#pragma once

// Random matrices of every format with their exact values, and helpers shared by the tests of
// linear layers.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "turbomind/ops/device.h"
#include "turbomind/ops/matrix_source.h"

namespace turbomind::testing {

inline constexpr float kSentinel = 12345.f;
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr MatrixFormat kAllFormats[] = {
    MatrixFormat::kF32,  MatrixFormat::kBF16,  MatrixFormat::kQ4_0,       MatrixFormat::kQ4_1,
    MatrixFormat::kQ8_0, MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split, MatrixFormat::kQ4_K,
    MatrixFormat::kQ5_K, MatrixFormat::kQ6_K,  MatrixFormat::kNvfp4};

struct Matrix {
  MatrixFormat format = MatrixFormat::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<uint8_t> bytes;        // as stored in a checkpoint
  std::vector<double> values;        // their exact values
  std::vector<uint8_t> scales = {};  // kMxfp4Split, and FP32 of FP8
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
// Matrices have different factors.
inline Matrix RandomNvfp4(int64_t rows, int64_t cols, uint32_t seed) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::mt19937 random(seed);
  Matrix m{MatrixFormat::kNvfp4, rows, cols, {}, {}};
  m.factor = std::ldexp(0x1.23p-12f, -static_cast<int>((seed + 1) % 3));
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

// Returns a random FP8 matrix. Every code is a number, and scales have all their bits.
inline Matrix RandomFp8(MatrixFormat format, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  Matrix m{format, rows, cols, {}, {}};
  const int64_t scale_cols = format == MatrixFormat::kFp8 ? cols : 128;
  float scale = 0;
  for (int64_t i = 0; i < rows * cols; ++i) {
    if (i % cols % scale_cols == 0) {
      scale = std::ldexp(static_cast<float>((1u << 23) + (random() >> 9)), -32);
      Append(m.scales, scale);
    }
    const auto code = static_cast<uint8_t>(random() % 0x7f + random() % 2 * 128);
    const int size = code % 128;
    const double magnitude =
        size < 8 ? std::ldexp(size, -9) : std::ldexp(8 + size % 8, size / 8 - 10);
    m.bytes.push_back(code);
    m.values.push_back((code < 128 ? magnitude : -magnitude) * scale);
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
  if (IsFp8(format)) {
    return RandomFp8(format, rows, cols, seed);
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

// A block of 32 activations of 12 bits: codes of at most 119 * 256 + 8 times a scale.
struct Int12Codes {
  float scale = 0;
  int of[32] = {};

  double sum() const { return std::accumulate(std::begin(of), std::end(of), 0.0); }
};

// Rounds a block as the kernels do. The code of column 16 + k is a multiple of 16. That of column k
// is a multiple of 16 plus the last digit of the former divided by 16.
inline Int12Codes RoundToInt12Codes(const float* x) {
  Int12Codes codes;
  float amax = 0;
  for (int i = 0; i < 32; ++i) {
    if (!std::isfinite(x[i])) {
      codes.scale = kNan;
      return codes;
    }
    amax = std::max(amax, std::abs(x[i]));
  }
  if (amax < 1e-33f) {
    return codes;
  }
  codes.scale = amax / (119.f * 256.f);
  const float inverse = 119.f * 16.f / amax;
  for (int k = 0; k < 16; ++k) {
    const auto second = static_cast<int>(std::nearbyint(x[16 + k] * inverse));
    const int digit = second & 15;
    const float steps = x[k] * inverse - static_cast<float>(digit) / 16.f;
    codes.of[k] = 16 * static_cast<int>(std::nearbyint(steps)) + digit;
    codes.of[16 + k] = 16 * second;
  }
  return codes;
}

// Rounds to BF16, to nearest even. Subnormal numbers become zero.
inline float RoundToBf16(float x) {
  if (!std::isfinite(x)) {
    return x;
  }
  auto bits = std::bit_cast<uint32_t>(x);
  bits = (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits + 0x7fffu + (bits >> 16 & 1);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

// Sets the values of a matrix to those of its bytes, rounded to BF16.
inline void RoundValues(Matrix& m) {
  m.values.clear();
  std::vector<float> row(static_cast<size_t>(m.cols));
  for (int64_t o = 0; o < m.rows; ++o) {
    DequantizeMatrixRow(m.source(), o, row.data());
    std::ranges::transform(row, std::back_inserter(m.values), RoundToBf16);
  }
}

// Returns a matrix of random bytes, whose scales have all their bits and are at most 2^-7. Its
// values are rounded to BF16.
inline Matrix RandomBf16Weights(MatrixFormat format, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  Matrix m{format, rows, cols, {}, {}};
  const auto fill = [&](std::vector<uint8_t>& bytes, int64_t size, auto byte) {
    bytes.resize(static_cast<size_t>(size));
    std::ranges::generate(bytes, [&] { return static_cast<uint8_t>(byte()); });
  };
  const auto exponent = [&] { return 115 + random() % 16; };
  const bool is_bf16 = format == MatrixFormat::kBF16;
  const int64_t block = is_bf16 ? 2 : SourceBlockBytes(format);
  fill(m.bytes, rows * cols / (is_bf16 ? 1 : SourceBlockCols(format)) * block, random);
  // Gives the FP16 number that ends at this byte an exponent from 2^-11 to 2^-8.
  const auto limit = [&](size_t at) { m.bytes[at] = (m.bytes[at] & 0x8f) | 0x10; };
  for (size_t at = 0; at < m.bytes.size(); at += static_cast<size_t>(block)) {
    if (format == MatrixFormat::kMxfp4) {
      m.bytes[at] = static_cast<uint8_t>(exponent());
    } else if (is_bf16) {
      m.bytes[at + 1] = (m.bytes[at + 1] & 0x83) | 0x3c;
    } else if (format == MatrixFormat::kQ6_K) {
      limit(at + 209);
    } else if (format != MatrixFormat::kMxfp4Split && format != MatrixFormat::kNvfp4) {
      limit(at + 1);
      if (HasMinimum(format)) {
        limit(at + 3);
      }
    }
  }
  if (format == MatrixFormat::kMxfp4Split) {
    fill(m.scales, rows * cols / 32, exponent);
  }
  m.factor = format == MatrixFormat::kNvfp4 ? 0x1.9p-16f : 1.f;  // the largest scale is 480
  RoundValues(m);
  return m;
}

// Sets the first scale of an output to the exponent of MXFP4, or to FP16 with this upper byte.
inline void SetScale(Matrix& m, int64_t output, uint8_t upper) {
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

// Values in a device's memory.
template <class T>
class DeviceArray {
 public:
  // The values begin `offset` elements after an aligned address.
  DeviceArray(Device& device, const std::vector<T>& values, size_t offset = 0)
      : device_(device), size_(values.size()), offset_(offset) {
    memory_ = static_cast<T*>(device.Reserve(bytes()));
    Write(values);
  }
  ~DeviceArray() { device_.Release(memory_, bytes()); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  // Null if there are no values.
  T* data() const { return size_ > 0 ? memory_ + offset_ : nullptr; }
  void Write(const std::vector<T>& values) const {
    device_.Copy(data(), values.data(), values.size() * sizeof(T));
    device_.Synchronize();
  }
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    device_.Synchronize();
    device_.Copy(values.data(), data(), size_ * sizeof(T));
    device_.Synchronize();
    return values;
  }

 private:
  size_t bytes() const { return (size_ + offset_) * sizeof(T); }

  Device& device_;
  size_t size_;
  size_t offset_;
  T* memory_ = nullptr;
};

struct Call {
  int num_rows = 1;
  bool bias = false;
  bool accumulate = false;
  int pad = 3;  // floats after each row of x, which are NaN, and of y, which must not change
};

// Returns the rows [begin, begin + count) with `pad` values after each.
inline std::vector<float> Padded(const std::vector<float>& x, int64_t cols, int64_t count, int pad,
                                 float value) {
  std::vector<float> padded(static_cast<size_t>(count * (cols + pad)), value);
  for (int64_t r = 0; r < count; ++r) {
    std::copy_n(x.begin() + r * cols, cols, padded.begin() + r * (cols + pad));
  }
  return padded;
}

// Does the inverse, and checks that the padding is the sentinel.
inline std::vector<float> Unpadded(const std::vector<float>& padded, int64_t cols, int pad) {
  std::vector<float> values;
  for (auto row = padded.begin(); row != padded.end(); row += cols + pad) {
    values.insert(values.end(), row, row + cols);
    REQUIRE(std::all_of(row + cols, row + cols + pad, [](float v) { return v == kSentinel; }));
  }
  return values;
}

// Runs one layer of several weights with the first rows of x, [num_rows, cols]. Returns y,
// [num_rows, outputs of all weights]. An empty bias is none.
inline std::vector<float> RunParts(Device& device, const std::vector<const PackedMatrix*>& weights,
                                   const std::vector<std::vector<float>>& biases,
                                   const std::vector<float>& x, Call call) {
  const int64_t cols = weights[0]->cols;
  std::vector<std::unique_ptr<DeviceArray<float>>> held;
  std::vector<LinearPart> parts;
  int64_t outputs = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool has_bias = call.bias && !biases[i].empty();
    if (has_bias) {
      held.push_back(std::make_unique<DeviceArray<float>>(device, biases[i]));
    }
    parts.push_back({weights[i], has_bias ? held.back()->data() : nullptr});
    outputs += weights[i]->rows;
  }
  const DeviceArray<float> from(device, Padded(x, cols, call.num_rows, call.pad, kNan));
  const DeviceArray<float> y(
      device,
      std::vector<float>(static_cast<size_t>(call.num_rows * (outputs + call.pad)), kSentinel));
  device.Linear({.x = from.data(),
                 .x_stride = cols + call.pad,
                 .parts = parts.data(),
                 .num_parts = static_cast<int>(parts.size()),
                 .y = y.data(),
                 .y_stride = outputs + call.pad,
                 .num_rows = call.num_rows,
                 .accumulate = call.accumulate});
  return Unpadded(y.Read(), outputs, call.pad);
}

inline std::vector<float> RunLinear(Device& device, const PackedMatrix& weight,
                                    const std::vector<float>& x, const std::vector<float>& bias,
                                    Call call) {
  return RunParts(device, {&weight}, {bias}, x, call);
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace turbomind::testing
