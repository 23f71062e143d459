#pragma once

// Calls of CudaLinear::Linear with random matrices, and their results in FP64.

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "cpu/linear_fixture.h"
#include "cpu/linear_suite.h"
#include "cuda/gpu_array.h"
#include "cuda/linear_gpu.h"

namespace turbomind::cuda {

using testing::Call;
using testing::kSentinel;
using testing::Matrix;
using testing::RandomMatrix;
using testing::RandomVector;

// Half a unit of BF16's 8 significant bits.
inline constexpr double kBF16Rounding = 0x1p-8;
// FP32 sums of exact products: roundings of 2^-24 of the partial sums.
inline constexpr double kSumRounding = 0x1p-22;
// One matrix of a stack, with all its values.
struct Part {
  Matrix matrix;
  std::vector<float> bias;
};

inline std::vector<Part> RandomParts(const std::vector<MatrixFormat>& formats,
                                     const std::vector<int64_t>& rows, int64_t cols) {
  std::vector<Part> parts;
  for (size_t i = 0; i < formats.size(); ++i) {
    const auto seed = static_cast<uint32_t>(100 * i + static_cast<size_t>(cols));
    parts.push_back({RandomMatrix(formats[i], rows[i], cols, seed), RandomVector(rows[i], seed)});
  }
  return parts;
}

// The result of a call. y is filled with sentinels before the call.
struct Outcome {
  std::vector<float> y;
  int64_t y_stride;
};

inline Outcome RunLinear(Gpu& gpu, const std::vector<Part>& parts, const std::vector<float>& x,
                         Call call) {
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<std::unique_ptr<GpuArray<float>>> biases;
  std::vector<LinearPart> linear_parts;
  int64_t outputs = 0;
  for (const Part& part : parts) {
    weights.push_back(CudaPackMatrix(gpu.memory, gpu.uploader, part.matrix.source(), false));
    biases.push_back(std::make_unique<GpuArray<float>>(gpu.stream, part.bias));
    linear_parts.push_back({weights.back().get(), call.bias ? biases.back()->data() : nullptr});
    outputs += part.matrix.rows;
  }
  const int64_t stride = outputs + call.pad;
  const GpuArray<float> x_gpu(gpu.stream, x);
  const GpuArray<float> y_gpu(
      gpu.stream, std::vector<float>(static_cast<size_t>(call.num_rows * stride), kSentinel));
  LinearParams params;
  params.x = x_gpu.data();
  params.x_stride = parts[0].matrix.cols + call.pad;
  params.parts = linear_parts.data();
  params.num_parts = static_cast<int>(linear_parts.size());
  params.y = y_gpu.data();
  params.y_stride = stride;
  params.num_rows = call.num_rows;
  params.accumulate = call.accumulate;
  gpu.linear.Linear(gpu.ctx, params);
  return {y_gpu.Read(), stride};
}

inline testing::ExactOutput ExactAt(const Matrix& m, const float* x, int64_t output) {
  const std::vector<double> row(m.values.begin() + output * m.cols,
                                m.values.begin() + (output + 1) * m.cols);
  const Matrix one = {m.format, 1, m.cols, {}, row};
  return testing::ExactOutputs(one, {x, x + m.cols})[0];
}

// Return the maximum distance of an output from its exact value. Formats with minima add d · code
// and the minimum, which is at most 1, separately.
inline double BoundOf(const testing::ExactOutput& out) {
  const double magnitude = out.magnitude + (HasMinimum(out.format) ? out.sum_of_x : 0.0);
  const bool rounds = out.format != MatrixFormat::kF32;
  return magnitude * ((rounds ? kBF16Rounding : 0.0) + kSumRounding) + 1e-6 +
         std::abs(out.want) * kSumRounding;
}

inline void CheckLinear(const std::vector<Part>& parts, const std::vector<float>& x,
                        const Outcome& got, Call call, double roundings = 1) {
  for (int r = 0; r < call.num_rows; ++r) {
    const float* row = x.data() + r * (parts[0].matrix.cols + call.pad);
    int64_t at = r * got.y_stride;
    for (const Part& part : parts) {
      for (int64_t o = 0; o < part.matrix.rows; ++o, ++at) {
        testing::ExactOutput out = ExactAt(part.matrix, row, o);
        const double want = out.product + (call.bias ? part.bias[static_cast<size_t>(o)] : 0.0) +
                            (call.accumulate ? kSentinel : 0.0);
        out.want = want;
        if (!(std::abs(got.y[static_cast<size_t>(at)] - want) <= roundings * BoundOf(out))) {
          FAIL_CHECK("row " << r << " output " << o << ": got " << got.y[static_cast<size_t>(at)]
                            << ", want " << want);
          return;
        }
      }
    }
    for (int i = 0; i < call.pad; ++i, ++at) {
      REQUIRE(got.y[static_cast<size_t>(at)] == kSentinel);
    }
  }
}

// Experts of one format and shape, and rows that are grouped by expert.
struct Groups {
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<Part> parts;
  std::vector<std::unique_ptr<GpuArray<float>>> biases;
  std::vector<LinearPart> experts;
};

inline Groups MakeGroups(Gpu& gpu, MatrixFormat format, int num_experts, int64_t rows,
                         int64_t cols) {
  Groups groups;
  for (int e = 0; e < num_experts; ++e) {
    const auto seed = static_cast<uint32_t>(e);
    groups.parts.push_back({RandomMatrix(format, rows, cols, seed), RandomVector(rows, seed + 50)});
    groups.weights.push_back(
        CudaPackMatrix(gpu.memory, gpu.uploader, groups.parts.back().matrix.source(), false));
    groups.biases.push_back(
        std::make_unique<GpuArray<float>>(gpu.stream, groups.parts.back().bias));
    groups.experts.push_back(
        {groups.weights.back().get(), e % 2 == 0 ? groups.biases.back()->data() : nullptr});
  }
  return groups;
}

inline std::vector<float> RunGrouped(Gpu& gpu, const Groups& groups, const std::vector<float>& x,
                                     const std::vector<int>& sizes,
                                     const std::vector<int32_t>& x_rows) {
  const Matrix& first = groups.parts[0].matrix;
  std::vector<int32_t> offsets = {0};
  for (int size : sizes) {
    offsets.push_back(offsets.back() + size);
  }
  const GpuArray<float> x_gpu(gpu.stream, x);
  const GpuArray<int32_t> rows_gpu(gpu.stream, x_rows);
  const GpuArray<int32_t> offsets_gpu(gpu.stream, offsets);
  const GpuArray<float> y_gpu(
      gpu.stream, std::vector<float>(static_cast<size_t>(offsets.back() * first.rows), kSentinel));
  GroupedLinearParams params;
  params.x = x_gpu.data();
  params.x_stride = first.cols;
  params.x_rows = rows_gpu.data();
  params.y = y_gpu.data();
  params.y_stride = first.rows;
  params.experts = groups.experts.data();
  params.num_experts = static_cast<int>(groups.experts.size());
  params.offsets = offsets_gpu.data();
  params.num_rows = offsets.back();
  gpu.linear.GroupedLinear(gpu.ctx, params);
  return y_gpu.Read();
}

}  // namespace turbomind::cuda
