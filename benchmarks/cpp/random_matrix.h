#pragma once

// Matrices of random values as a checkpoint stores them, made in no time: parts of a few megabytes
// that are random, again and again.

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

constexpr int64_t kPeriod = int64_t{1} << 22;  // random bytes, a multiple of every block
constexpr float kDeviation = 0.02f;            // of values in BF16, as trained weights have it
constexpr uint16_t kScale = 0x1800;            // FP16 2^-9
constexpr uint8_t kExponent = 120;             // of MXFP4: 2^-7

inline MatrixFormat FormatOf(const std::string& name) {
  const std::map<std::string, MatrixFormat> formats = {
      {"bf16", MatrixFormat::kBF16}, {"q4_0", MatrixFormat::kQ4_0},
      {"q8_0", MatrixFormat::kQ8_0}, {"mxfp4", MatrixFormat::kMxfp4},
      {"f32", MatrixFormat::kF32},   {"mxfp4_split", MatrixFormat::kMxfp4Split}};
  const auto found = formats.find(name);
  if (found == formats.end()) {
    throw std::invalid_argument("format: got " + name);
  }
  return found->second;
}

// Bytes of 32 values in `data`.
inline int64_t BlockBytes(MatrixFormat format) {
  switch (format) {
    case MatrixFormat::kF32:
      return 128;
    case MatrixFormat::kBF16:
      return 64;
    case MatrixFormat::kQ8_0:
      return 34;
    case MatrixFormat::kQ4_1:
      return 20;
    case MatrixFormat::kQ4_0:
      return 18;
    case MatrixFormat::kMxfp4:
      return 17;
    case MatrixFormat::kMxfp4Split:
      return 16;
  }
  __builtin_unreachable();
}

// Gives out sources that lie in one buffer per format; valid until a larger one is asked for.
class RandomMatrices {
 public:
  MatrixSource Source(MatrixFormat format, int64_t rows, int64_t cols) {
    const int64_t blocks = rows * cols / 32;
    std::vector<uint8_t>& data = data_[format];
    Grow(data, blocks * BlockBytes(format),
         [&](std::vector<uint8_t>& part) { FillPart(format, part); });
    MatrixSource source;
    source.format = format;
    source.data = data.data();
    source.rows = rows;
    source.cols = cols;
    if (format == MatrixFormat::kMxfp4Split) {
      scales_.resize(std::max(scales_.size(), static_cast<size_t>(blocks)), kExponent);
      source.scales = scales_.data();
    }
    return source;
  }

 private:
  template <class F>
  static void Grow(std::vector<uint8_t>& data, int64_t num_bytes, F fill) {
    const auto wanted = static_cast<size_t>(num_bytes);
    if (data.size() >= wanted) {
      return;
    }
    std::vector<uint8_t> part;
    fill(part);
    data.resize(wanted);
    for (size_t at = 0; at < wanted; at += part.size()) {
      std::memcpy(data.data() + at, part.data(), std::min(part.size(), wanted - at));
    }
  }

  void FillPart(MatrixFormat format, std::vector<uint8_t>& part) {
    const int64_t block = BlockBytes(format);
    part.resize(static_cast<size_t>(kPeriod / block * block));
    std::normal_distribution<float> normal(0.f, kDeviation);
    for (int64_t at = 0; at < static_cast<int64_t>(part.size()); at += block) {
      uint8_t* to = part.data() + at;
      if (format == MatrixFormat::kBF16 || format == MatrixFormat::kF32) {
        FillFloats(format, to, normal);
        continue;
      }
      for (int64_t i = 0; i < block; ++i) {
        to[i] = static_cast<uint8_t>(random_());
      }
      if (format == MatrixFormat::kMxfp4) {
        to[0] = kExponent;
      } else if (format != MatrixFormat::kMxfp4Split) {
        std::memcpy(to, &kScale, sizeof(kScale));
      }
      if (format == MatrixFormat::kQ4_1) {
        std::memcpy(to + sizeof(kScale), &kScale, sizeof(kScale));
      }
    }
  }

  void FillFloats(MatrixFormat format, uint8_t* to, std::normal_distribution<float>& normal) {
    for (int i = 0; i < 32; ++i) {
      const float value = normal(random_);
      const uint16_t rounded = FloatToBFloat16(value);
      if (format == MatrixFormat::kBF16) {
        std::memcpy(to + 2 * i, &rounded, sizeof(rounded));
      } else {
        std::memcpy(to + 4 * i, &value, sizeof(value));
      }
    }
  }

  std::mt19937 random_{5};
  std::map<MatrixFormat, std::vector<uint8_t>> data_;
  std::vector<uint8_t> scales_;
};

}  // namespace turbomind::bench
