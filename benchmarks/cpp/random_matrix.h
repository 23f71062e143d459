#pragma once

// Matrices of random values as a checkpoint stores them. A few random megabytes repeat, so that a
// large matrix takes no time to make.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "turbomind/core/float_convert.h"
#include "turbomind/ops/params.h"

namespace turbomind::bench {

constexpr int64_t kPeriodBlocks = int64_t{1} << 16;  // random blocks of 32 values
constexpr float kDeviation = 0.02f;                  // of values in BF16, as in trained weights
constexpr uint16_t kScale = 0x1800;                  // FP16 2^-9
constexpr uint8_t kExponent = 120;                   // of MXFP4: 2^-7

inline MatrixFormat FormatOf(const std::string& name) {
  static const std::map<std::string, MatrixFormat> formats = {
      {"bf16", MatrixFormat::kBF16},
      {"q4_0", MatrixFormat::kQ4_0},
      {"q8_0", MatrixFormat::kQ8_0},
      {"mxfp4_split", MatrixFormat::kMxfp4Split}};
  if (!formats.contains(name)) {
    throw std::invalid_argument("format " + name + " is unknown");
  }
  return formats.at(name);
}

// Returns the bytes of 32 values in `data`.
inline int64_t BlockBytes(MatrixFormat format) {
  return format == MatrixFormat::kBF16   ? 64
         : format == MatrixFormat::kQ8_0 ? 34
         : format == MatrixFormat::kQ4_0 ? 18
                                         : 16;
}

// Has one buffer per format. A source is valid until a larger one of the same format is made.
class RandomMatrices {
 public:
  MatrixSource Source(MatrixFormat format, int64_t rows, int64_t cols) {
    const auto blocks = static_cast<size_t>(rows * cols / 32);
    const size_t num_bytes = blocks * static_cast<size_t>(BlockBytes(format));
    std::vector<uint8_t>& data = data_[format];
    if (data.size() < num_bytes) {
      const std::vector<uint8_t> part = RandomPart(format);
      data.resize(num_bytes);
      for (size_t at = 0; at < num_bytes; at += part.size()) {
        std::memcpy(data.data() + at, part.data(), std::min(part.size(), num_bytes - at));
      }
    }
    MatrixSource source;
    source.format = format;
    source.data = data.data();
    source.rows = rows;
    source.cols = cols;
    if (format == MatrixFormat::kMxfp4Split) {
      scales_.resize(std::max(scales_.size(), blocks), kExponent);
      source.scales = scales_.data();
    }
    return source;
  }

 private:
  std::vector<uint8_t> RandomPart(MatrixFormat format) {
    const int64_t block = BlockBytes(format);
    std::vector<uint8_t> part(static_cast<size_t>(kPeriodBlocks * block));
    if (format == MatrixFormat::kBF16) {
      std::normal_distribution<float> normal(0.f, kDeviation);
      for (size_t at = 0; at < part.size(); at += 2) {
        const uint16_t value = FloatToBFloat16(normal(random_));
        std::memcpy(part.data() + at, &value, sizeof(value));
      }
      return part;
    }
    std::generate(part.begin(), part.end(), [&] { return static_cast<uint8_t>(random_()); });
    for (int64_t i = 0; format != MatrixFormat::kMxfp4Split && i < kPeriodBlocks; ++i) {
      std::memcpy(part.data() + i * block, &kScale, sizeof(kScale));
    }
    return part;
  }

  std::mt19937 random_{5};
  std::map<MatrixFormat, std::vector<uint8_t>> data_;
  std::vector<uint8_t> scales_;
};

}  // namespace turbomind::bench
