// Compares linear layers that compute the norm of x, or the activation of y, with the separate ops.

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "cuda/linear_call.h"
#include "turbomind/backend/cuda/dense/dense_ops.h"

namespace turbomind::cuda {
namespace {

using testing::SameBits;

constexpr MatrixFormat kFormats[] = {
    MatrixFormat::kF32,   MatrixFormat::kBF16,       MatrixFormat::kQ4_0, MatrixFormat::kQ4_1,
    MatrixFormat::kQ8_0,  MatrixFormat::kMxfp4Split, MatrixFormat::kFp8,  MatrixFormat::kFp8Block,
    MatrixFormat::kNvfp4, MatrixFormat::kQ4_K,       MatrixFormat::kQ5_K, MatrixFormat::kQ6_K};
// A sum of squares, its root, its inverse, and two products.
constexpr double kNormRounding = 0x1p-21;
constexpr float kEps = 1e-2f;  // matters for rows of small values

int64_t ColsOf(MatrixFormat format) { return IsKQuant(format) ? 512 : 320; }

// A layer with all of its arrays on the GPU.
struct Layer {
  Layer(Gpu& on, MatrixFormat format, const std::vector<int64_t>& outputs, int num_rows)
      : gpu(on),
        parts(RandomParts(std::vector(outputs.size(), format), outputs, ColsOf(format))),
        rows(num_rows),
        cols(ColsOf(format)),
        total(std::accumulate(outputs.begin(), outputs.end(), int64_t{0})),
        x_host(RandomVector(rows * cols, 3)),
        norm_host(RandomVector(cols, 4)),
        x(gpu.stream, Scaled(x_host)),
        norm_weight(gpu.stream, norm_host),
        normed(gpu.stream, Filled(rows * cols)),
        y(gpu.stream, Filled(rows * total)),
        activated(gpu.stream, Filled(rows * total / 2)) {
    for (const Part& part : parts) {
      weights.push_back(CudaPackMatrix(gpu.memory, gpu.uploader, part.matrix.source(), false));
      biases.push_back(std::make_unique<GpuArray<float>>(gpu.stream, part.bias));
      linear_parts.push_back({weights.back().get(), biases.back()->data()});
    }
  }

  static std::vector<float> Filled(int64_t size) {
    return std::vector<float>(static_cast<size_t>(size), kSentinel);
  }
  // Rows differ in size, so that each needs its own norm.
  std::vector<float>& Scaled(std::vector<float>& values) const {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] *= std::exp2(static_cast<float>(i / static_cast<size_t>(cols)) - 3.f);
    }
    return values;
  }

  ProjectParams Params(bool with_norm, bool with_gate) const {
    ProjectParams params;
    if (with_norm) {
      params.norm = {.x = x.data(),
                     .weight = norm_weight.data(),
                     .out = normed.data(),
                     .num_rows = rows,
                     .dim = static_cast<int>(cols),
                     .eps = kEps};
    }
    params.linear = {.x = with_norm ? normed.data() : x.data(),
                     .x_stride = cols,
                     .parts = linear_parts.data(),
                     .num_parts = static_cast<int>(linear_parts.size()),
                     .y = y.data(),
                     .y_stride = total,
                     .num_rows = rows};
    if (with_gate) {
      params.gate = {.gate_up = y.data(),
                     .out = activated.data(),
                     .num_rows = rows,
                     .dim = static_cast<int>(total / 2)};
    }
    return params;
  }

  LinearStack Stack(bool with_norm, bool with_gate) const {
    return *StackOfCall(linear_parts, with_norm, with_gate);
  }
  void Choose(const LinearStack& stack, LinearKernel kernel) const {
    for (int bucket = 0; bucket < NumRowBuckets(stack); ++bucket) {
      gpu.linear.choices().Set(stack, bucket, kernel);
    }
  }

  Gpu& gpu;
  std::vector<Part> parts;
  int rows;
  int64_t cols;
  int64_t total;  // outputs
  std::vector<float> x_host, norm_host;
  GpuArray<float> x, norm_weight, normed, y, activated;
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<std::unique_ptr<GpuArray<float>>> biases;
  std::vector<LinearPart> linear_parts;
};

// Return the norm of row `r` in FP64.
std::vector<double> ExactNorm(const Layer& layer, int r) {
  const std::span x =
      std::span(layer.x_host)
          .subspan(static_cast<size_t>(r * layer.cols), static_cast<size_t>(layer.cols));
  double squares = 0;
  for (const float value : x) {
    squares += double{value} * value;
  }
  const double scale = 1 / std::sqrt(squares / static_cast<double>(layer.cols) + double{kEps});
  std::vector<double> normed;
  for (size_t c = 0; c < x.size(); ++c) {
    normed.push_back(x[c] * scale * layer.norm_host[c]);
  }
  return normed;
}

void CheckNormedProducts(const Layer& layer, const std::vector<float>& y) {
  for (int r = 0; r < layer.rows; ++r) {
    const std::vector<double> x = ExactNorm(layer, r);
    int64_t at = r * layer.total;
    for (const Part& part : layer.parts) {
      const Matrix& m = part.matrix;
      const bool rounds = m.format != MatrixFormat::kF32;
      for (int64_t o = 0; o < m.rows; ++o, ++at) {
        double want = part.bias[static_cast<size_t>(o)];
        double magnitude = std::abs(want);
        for (int64_t c = 0; c < m.cols; ++c) {
          const double term =
              m.values[static_cast<size_t>(o * m.cols + c)] * x[static_cast<size_t>(c)];
          want += term;
          magnitude +=
              std::abs(term) + (HasMinimum(m.format) ? std::abs(x[static_cast<size_t>(c)]) : 0);
        }
        const double bound = magnitude * ((rounds ? kBF16Rounding : 0) + 2 * kSumRounding) + 1e-6;
        const double got = y[static_cast<size_t>(at)];
        if (!(std::abs(got - want) <= bound)) {
          FAIL_CHECK("row " << r << " output " << o << ": got " << got << ", want " << want);
          return;
        }
      }
    }
  }
}

TEST_CASE("a fused norm agrees with FP64 and stores the normed rows if they are needed") {
  Gpu gpu;
  for (const MatrixFormat format : kFormats) {
    for (const int rows : {1, 3, 8}) {
      for (const std::vector<int64_t>& outputs : {std::vector<int64_t>{40, 16, 21}, {700}}) {
        const Layer layer(gpu, format, outputs, rows);
        CAPTURE(InfoOf(format).name);
        CAPTURE(rows);
        layer.Choose(layer.Stack(true, false), LinearKernel::kFused);
        ProjectParams params = layer.Params(true, false);
        gpu.linear.Project(gpu.ctx, params);
        const std::vector<float> y = layer.y.Read();
        CheckNormedProducts(layer, y);
        CHECK(layer.normed.Read() == Layer::Filled(rows * layer.cols));
        params.keeps_normed = true;
        gpu.linear.Project(gpu.ctx, params);
        CHECK(SameBits(layer.y.Read(), y));
        const std::vector<float> normed = layer.normed.Read();
        for (int r = 0; r < rows; ++r) {
          const std::vector<double> want = ExactNorm(layer, r);
          for (size_t c = 0; c < want.size(); ++c) {
            const float got = normed[static_cast<size_t>(r * layer.cols) + c];
            REQUIRE(std::abs(got - want[c]) <= kNormRounding * std::abs(want[c]));
          }
        }
      }
    }
  }
}

TEST_CASE("a fused activation has the bits of separate ops") {
  Gpu gpu;
  for (const MatrixFormat format : kFormats) {
    for (const int rows : {1, 3, 8, 13, 19}) {
      for (const int64_t dim : {int64_t{16}, int64_t{37}, int64_t{200}}) {
        for (const bool with_norm : {false, true}) {
          if (format == MatrixFormat::kF32 || (with_norm && rows > kMaxFusedNormRows)) {
            continue;
          }
          const Layer layer(gpu, format, {dim, dim}, rows);
          CAPTURE(InfoOf(format).name);
          CAPTURE(rows);
          CAPTURE(dim);
          CAPTURE(with_norm);
          // The norm is fused in both calls, because it changes the bits.
          const ProjectParams params = layer.Params(with_norm, true);
          ProjectParams without_gate = params;
          without_gate.gate = {};
          layer.Choose(layer.Stack(with_norm, false),
                       with_norm ? LinearKernel::kFused : LinearKernel::kStream2);
          gpu.linear.Project(gpu.ctx, without_gate);
          CudaGatedActivation(gpu.ctx, params.gate);
          const std::vector<float> want = layer.activated.Read();
          const GpuArray<float> other(gpu.stream, Layer::Filled(rows * dim));
          ProjectParams fused = params;
          fused.gate.out = other.data();
          layer.Choose(layer.Stack(with_norm, true), LinearKernel::kFused);
          gpu.linear.Project(gpu.ctx, fused);
          CHECK(SameBits(other.Read(), want));
        }
      }
    }
  }
}

TEST_CASE("a fused activation of experts has the bits of separate ops") {
  Gpu gpu;
  const std::vector<int> sizes = {3, 0, 1, 12, 0, 2};
  for (const MatrixFormat format : kFormats) {
    if (format == MatrixFormat::kF32) {
      continue;
    }
    const int64_t cols = ColsOf(format);
    const Groups groups = MakeGroups(gpu, format, static_cast<int>(sizes.size()), 74, cols);
    for (const int scale : {1, 2}) {
      std::vector<int32_t> offsets = {0};
      for (const int size : sizes) {
        offsets.push_back(offsets.back() + scale * size);
      }
      const int num_rows = offsets.back();
      const GpuArray<float> x(gpu.stream, RandomVector(num_rows * cols, 5));
      const GpuArray<int32_t> begins(gpu.stream, offsets);
      const GpuArray<float> y(gpu.stream, Layer::Filled(int64_t{num_rows} * 74));
      const GpuArray<float> out(gpu.stream, Layer::Filled(int64_t{num_rows} * 37));
      const GroupedGateParams params = {{.x = x.data(),
                                         .x_stride = cols,
                                         .y = y.data(),
                                         .y_stride = 74,
                                         .experts = groups.experts.data(),
                                         .num_experts = static_cast<int>(sizes.size()),
                                         .offsets = begins.data(),
                                         .num_rows = num_rows},
                                        {.gate_up = y.data(),
                                         .out = out.data(),
                                         .num_rows = num_rows,
                                         .dim = 37,
                                         .activation = Activation::kClampedSwiglu,
                                         .interleaved = true,
                                         .limit = 1.f}};
      LinearStack stack = StackOfExperts(groups.experts);
      stack.gated = true;
      const auto run = [&](LinearKernel kernel) {
        for (int bucket = 0; bucket < NumRowBuckets(stack); ++bucket) {
          gpu.linear.choices().Set(stack, bucket, kernel);
        }
        gpu.linear.GroupedGate(gpu.ctx, params);
        return out.Read();
      };
      CAPTURE(InfoOf(format).name);
      const std::vector<float> want = run(LinearKernel::kStream2);
      CHECK(SameBits(run(LinearKernel::kFused), want));
    }
  }
}

TEST_CASE("calls that cannot be fused compute the same in separate launches") {
  Gpu gpu;
  Layer layer(gpu, MatrixFormat::kQ8_0, {40}, 2);
  const LinearStack stack = layer.Stack(true, false);
  ProjectParams params = layer.Params(true, false);
  gpu.linear.Project(gpu.ctx, params);
  const std::vector<float> want = layer.y.Read();
  layer.Choose(stack, LinearKernel::kFused);
  gpu.linear.Project(gpu.ctx, params);
  CHECK_FALSE(SameBits(layer.y.Read(), want));  // the kernel was used
  // LayerNorm, a bias, and an address that is not aligned.
  const GpuArray<float> zeros(gpu.stream, std::vector<float>(static_cast<size_t>(layer.cols)));
  ProjectParams biased = params;
  biased.norm.bias = zeros.data();
  gpu.linear.Project(gpu.ctx, biased);
  CHECK(SameBits(layer.y.Read(), want));
  ProjectParams centered = params;
  centered.norm.centered = true;
  gpu.linear.Project(gpu.ctx, centered);
  CHECK_FALSE(SameBits(layer.y.Read(), want));
  const GpuArray<float> shifted(gpu.stream, layer.x_host, 1);
  ProjectParams odd = params;
  odd.norm.x = shifted.data();
  gpu.linear.Project(gpu.ctx, odd);
  CHECK(SameBits(layer.y.Read(), want));
  gpu.ctx.deterministic = true;
  gpu.linear.Project(gpu.ctx, params);
  CHECK(SameBits(layer.y.Read(), want));
}

}  // namespace
}  // namespace turbomind::cuda
