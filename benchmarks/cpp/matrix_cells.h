#pragma once

// Measures linear layers and copies of one shape. The launches of a step cycle through
// equal matrices at different addresses.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench_device.h"
#include "kv_cells.h"

namespace turbomind::bench {

// The formats of matrices, the values and bytes of a block in `data`, and where its FP16 scales
// are. In NVFP4, such a scale is a pair of E4M3 scales, 0 and 2^-4.
struct NamedFormat {
  const char* name;
  MatrixFormat format;
  int64_t block_cols;
  int64_t block_bytes;
  std::vector<size_t> scales_at;
};
inline const NamedFormat kFormats[] = {
    {"bf16", MatrixFormat::kBF16, 32, 64, {}},
    {"q8_0", MatrixFormat::kQ8_0, 32, 34, {0}},
    {"q4_0", MatrixFormat::kQ4_0, 32, 18, {0}},
    {"q4_1", MatrixFormat::kQ4_1, 32, 20, {0, 2}},
    {"q4_k", MatrixFormat::kQ4_K, 256, 144, {0, 2}},
    {"q5_k", MatrixFormat::kQ5_K, 256, 176, {0, 2}},
    {"q6_k", MatrixFormat::kQ6_K, 256, 210, {208}},
    {"nvfp4", MatrixFormat::kNvfp4, 64, 36, {0, 2}},
    {"mxfp4_split", MatrixFormat::kMxfp4Split, 32, 16, {}},
};

inline const NamedFormat& FormatOf(const std::string& name) {
  for (const NamedFormat& format : kFormats) {
    if (name == format.name) {
      return format;
    }
  }
  throw std::invalid_argument("format is " + name +
                              ". It must be bf16, q8_0, q4_0, q4_1, q4_k, q5_k, q6_k, "
                              "nvfp4 or mxfp4_split.");
}

// A matrix of random codes with small constant scales. BF16 values lie between -1/8 and 1/8. A few
// random megabytes repeat, so that a large matrix takes no time to make.
class RandomMatrix {
 public:
  RandomMatrix(const NamedFormat& format, int64_t rows, int64_t cols)
      : data_(static_cast<size_t>(rows * cols / format.block_cols * format.block_bytes)),
        scales_(static_cast<size_t>(rows * cols / 32), kExponent) {
    const auto block = static_cast<size_t>(format.block_bytes);
    const size_t period = std::min(data_.size(), kPeriodBlocks * block);
    std::mt19937 random(5);
    std::generate_n(data_.begin(), period, [&] { return static_cast<uint8_t>(random()); });
    for (size_t at = 0; at < period; at += block) {
      for (const size_t scale_at : format.scales_at) {
        std::memcpy(data_.data() + at + scale_at, &kScale, sizeof(kScale));
      }
      for (size_t i = 1; format.format == MatrixFormat::kBF16 && i < block; i += 2) {
        data_[at + i] = static_cast<uint8_t>((data_[at + i] & 0x81) | 0x3c);  // sign, exponent
      }
    }
    for (size_t at = period; at < data_.size(); at += period) {
      std::memcpy(data_.data() + at, data_.data(), std::min(period, data_.size() - at));
    }
    source_ = {.format = format.format, .data = data_.data(), .rows = rows, .cols = cols};
    if (format.format == MatrixFormat::kMxfp4Split) {
      source_.scales = scales_.data();
    }
  }
  const MatrixSource& source() const { return source_; }

 private:
  static constexpr size_t kPeriodBlocks = size_t{1} << 16;
  static constexpr uint16_t kScale = 0x1800;  // FP16 2^-9
  static constexpr uint8_t kExponent = 120;   // of MXFP4: 2^-7
  std::vector<uint8_t> data_;
  std::vector<uint8_t> scales_;
  MatrixSource source_;
};

struct MatrixShape {
  explicit MatrixShape(Cell& cell)
      : format(FormatOf(cell.Text("format", "bf16"))),
        tokens(cell.Number("batch", 1)),
        rows(cell.Number("rows", 4096)),
        cols(cell.Number("cols", 4096)) {
    if (tokens < 1 || rows < 1 || cols < 1 || cols % format.block_cols != 0) {
      throw std::invalid_argument("Sizes must be positive, and cols a multiple of " +
                                  std::to_string(format.block_cols) + ".");
    }
  }
  const NamedFormat& format;
  int tokens;
  int rows;
  int cols;
};

// A step of `tokens` sequences with one token each, which a device may record. More tokens than
// kMaxDecoding form one prompt.
class PlainStep {
 public:
  PlainStep(Device& device, int tokens)
      : device_(device), shape_(ShapeOf(tokens)), host_(shape_, shape_.batch) {
    group_ = {.batch = host_.batch, .kv_heads = 1};
  }
  template <class F>
  void Run(int launches, F launch) {
    device_.RunStep(
        {.tokens = host_.tokens.data(), .groups = &group_, .num_groups = 1, .q_heads = 1}, [&] {
          for (int i = 0; i < launches; ++i) {
            launch(i);
          }
        });
  }

 private:
  static constexpr int kMaxDecoding = 256;
  static KvShape ShapeOf(int tokens) {
    Cell none("");
    KvShape shape(none);
    shape.batch = tokens > kMaxDecoding ? 1 : tokens;
    shape.new_tokens = tokens > kMaxDecoding ? tokens : 1;
    shape.context = shape.new_tokens;
    return shape;
  }

  Device& device_;
  KvShape shape_;
  StepArraysOnHost host_;
  StepGroup group_;
};

// Equal matrices, one for each layer.
class MatrixBench {
 public:
  MatrixBench(Device& device, const MatrixShape& shape, const Limits& limits) {
    const RandomMatrix matrix(shape.format, shape.rows, shape.cols);
    matrices_.push_back(device.PackMatrix(matrix.source(), false));
    const int64_t layer_bytes = matrices_[0]->num_bytes();
    launches_ = limits.LaunchesFor(layer_bytes);
    for (int layer = 1; layer < limits.LayersFor(layer_bytes); ++layer) {
      matrices_.push_back(device.PackMatrix(matrix.source(), false));
    }
    for (const auto& packed : matrices_) {
      parts_.push_back({.weight = packed.get()});
    }
  }
  int launches() const { return launches_; }
  int layers() const { return static_cast<int>(parts_.size()); }
  const LinearPart* Layer(int launch) const {
    return &parts_[static_cast<size_t>(launch) % parts_.size()];
  }

 private:
  std::vector<std::unique_ptr<PackedMatrix>> matrices_;
  std::vector<LinearPart> parts_;
  int launches_ = 0;
};

inline Measured MeasureLinear(Device& device, const MatrixShape& shape, const Limits& limits) {
  const MatrixBench matrices(device, shape, limits);
  PlainStep step(device, shape.tokens);
  const DeviceBuffer x(device, RandomValues(kPeriodValues, 1), int64_t{shape.tokens} * shape.cols);
  const DeviceBuffer y(
      device, sizeof(float) * static_cast<size_t>(shape.tokens) * static_cast<size_t>(shape.rows));
  const auto params = [&](int launch) {
    return LinearParams{.x = x.As<float>(),
                        .x_stride = shape.cols,
                        .parts = matrices.Layer(launch),
                        .num_parts = 1,
                        .y = y.As<float>(),
                        .y_stride = shape.rows,
                        .num_rows = shape.tokens};
  };
  const Timing timing = Measure(device, matrices.launches(), limits.round_seconds, [&] {
    step.Run(matrices.launches(), [&](int i) { device.Linear(params(i)); });
  });
  return {timing, CostOf(params(0)), matrices.layers()};
}

// Measures a copy within the memory of the device. Bytes read and bytes written both count.
inline Measured MeasureCopy(Device& device, int64_t num_bytes, const Limits& limits) {
  const auto size = static_cast<size_t>(num_bytes);
  const DeviceBuffer from(device, RandomValues(kPeriodValues, 1),
                          num_bytes / int64_t{sizeof(float)});
  const DeviceBuffer to(device, size);
  const Timing timing = Measure(device, limits.launches, limits.round_seconds, [&] {
    for (int i = 0; i < limits.launches; ++i) {
      device.Copy(to.As<std::byte>(), from.As<std::byte>(), size);
    }
  });
  return {timing, CopyCost(size), 1};
}

}  // namespace turbomind::bench
