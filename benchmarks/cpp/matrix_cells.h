#pragma once

// Linear layers, experts and copies: what is measured of one shape. Launches of a step take turns
// with equal matrices at addresses of their own.

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "bench_device.h"
#include "kv_cells.h"
#include "random_matrix.h"

namespace turbomind::bench {

struct MatrixShape {
  explicit MatrixShape(Cell& cell)
      : format(FormatOf(cell.Text("format", "bf16"))),
        tokens(cell.Number("batch", 1)),
        rows(cell.Number("rows", 4096)),
        cols(cell.Number("cols", 4096)),
        num_experts(cell.Number("experts", 1)),
        top_k(cell.Number("top_k", 1)) {
    if (tokens < 1 || rows < 1 || cols < 32 || cols % 32 != 0 || top_k < 1 || top_k > num_experts) {
      throw std::invalid_argument("shape: wanted positive sizes, cols in 32s, top_k <= experts");
    }
  }
  MatrixFormat format;
  int tokens;
  int rows;
  int cols;
  int num_experts;
  int top_k;
};

// A step of as many sequences with one token each, so that a device may record it; above
// kMaxDecoding of one prompt.
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

// Layers of `num_experts` matrices.
class MatrixBench {
 public:
  MatrixBench(Device& device, const MatrixShape& shape, const Limits& limits) {
    RandomMatrices random;
    const MatrixSource source = random.Source(shape.format, shape.rows, shape.cols);
    const auto add = [&] {
      for (int i = 0; i < shape.num_experts; ++i) {
        matrices_.push_back(device.PackMatrix(source, false));
      }
    };
    add();
    const int64_t layer_bytes = matrices_[0]->num_bytes() * shape.num_experts;
    launches_ = limits.LaunchesFor(layer_bytes);
    layers_ = limits.LayersFor(layer_bytes);
    for (int layer = 1; layer < layers_; ++layer) {
      add();
    }
    for (const auto& matrix : matrices_) {
      parts_.push_back({.weight = matrix.get()});
    }
  }
  int launches() const { return launches_; }
  int layers() const { return layers_; }
  const LinearPart* Layer(int launch, int num_experts) const {
    return &parts_[static_cast<size_t>(launch % layers_) * static_cast<size_t>(num_experts)];
  }

 private:
  std::vector<std::unique_ptr<PackedMatrix>> matrices_;
  std::vector<LinearPart> parts_;
  int launches_ = 0;
  int layers_ = 0;
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
                        .parts = matrices.Layer(launch, 1),
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

// Every token goes to top_k experts, sampled at random: rows in order of experts.
struct Routing {
  std::vector<int32_t> offsets;
  std::vector<int32_t> x_rows;

  explicit Routing(const MatrixShape& shape) : offsets{0} {
    std::mt19937 random(3);
    std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(shape.num_experts));
    std::vector<size_t> order(tokens.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (int token = 0; token < shape.tokens; ++token) {
      std::shuffle(order.begin(), order.end(), random);
      for (int i = 0; i < shape.top_k; ++i) {
        tokens[order[static_cast<size_t>(i)]].push_back(token);
      }
    }
    for (const std::vector<int32_t>& of_expert : tokens) {
      x_rows.insert(x_rows.end(), of_expert.begin(), of_expert.end());
      offsets.push_back(static_cast<int32_t>(x_rows.size()));
    }
  }
};

inline Measured MeasureExperts(Device& device, const MatrixShape& shape, const Limits& limits) {
  const MatrixBench matrices(device, shape, limits);
  PlainStep step(device, shape.tokens);
  const Routing routing(shape);
  const DeviceBuffer offsets(device, routing.offsets);
  const DeviceBuffer x_rows(device, routing.x_rows);
  const DeviceBuffer x(device, RandomValues(kPeriodValues, 1), int64_t{shape.tokens} * shape.cols);
  const DeviceBuffer y(device,
                       sizeof(float) * routing.x_rows.size() * static_cast<size_t>(shape.rows));
  const auto params = [&](int launch) {
    return GroupedLinearParams{.x = x.As<float>(),
                               .x_stride = shape.cols,
                               .x_rows = x_rows.As<int32_t>(),
                               .y = y.As<float>(),
                               .y_stride = shape.rows,
                               .experts = matrices.Layer(launch, shape.num_experts),
                               .num_experts = shape.num_experts,
                               .offsets = offsets.As<int32_t>(),
                               .num_rows = static_cast<int>(routing.x_rows.size())};
  };
  const Timing timing = Measure(device, matrices.launches(), limits.round_seconds, [&] {
    step.Run(matrices.launches(), [&](int i) { device.GroupedLinear(params(i)); });
  });
  return {timing, CostOf(params(0), routing.offsets.data()), matrices.layers()};
}

// From one end of the memory to the other: bytes read and bytes written count.
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
