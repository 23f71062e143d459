// ⑥⑦ RMSNorm and gated activations of one row. Portable loops over lanes that the compiler turns
// into the vectors of each instruction set; without contraction, so the bits are the same in all.

#include "turbomind/backend/cpu/isa/dense.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear.h"
#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {
namespace {

constexpr int kLanes = 64;  // four 512-bit sums hide the latency of addition

// exp(x) clipped to [-87, 88], branch-free; relative error below 2e-7.
TM_HD float Exp(float x) {
  constexpr float kLog2e = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // few bits: n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.f;  // 1.5 · 2^23: adding it rounds to an integer
  const float low = x > -87.f ? x : -87.f;
  const float clipped = low < 88.f ? low : 88.f;
  const float n = (clipped * kLog2e + kRound) - kRound;
  const float r = (clipped - n * kLn2High) - n * kLn2Low;
  float p = 1.f / 5040;  // Taylor, |r| <= ln 2 / 2
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  return p * scale;
}

TM_HD float Sigmoid(float x) { return 1.f / (1.f + Exp(-x)); }

TM_HD float SumOfSquares(const float* x, int dim) {
  float lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      lanes[j] += x[i + j] * x[i + j];
    }
  }
  for (int j = 0; i + j < dim; ++j) {
    lanes[j] += x[i + j] * x[i + j];
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      lanes[j] += lanes[j + width];
    }
  }
  return lanes[0];
}

// out[i] = fn(gate[i], up[i]) of one row, in the form that gate_up has.
template <class Fn>
TM_HD void Gate(const GatedActivationParams& params, int64_t row, Fn fn) {
  const int64_t dim = params.dim;
  const float* in = params.gate_up + 2 * row * dim;
  float* out = params.out + row * dim;
  if (params.interleaved) {
    for (int64_t i = 0; i < dim; ++i) {
      out[i] = fn(in[2 * i], in[2 * i + 1]);
    }
    return;
  }
  for (int64_t i = 0; i < dim; ++i) {
    out[i] = fn(in[i], in[dim + i]);
  }
}

}  // namespace

void RmsNormRow(const float* x, const float* weight, float eps, int dim, float* out) {
  const float mean = SumOfSquares(x, dim) / static_cast<float>(dim);
  const float scale = 1.f / __builtin_sqrtf(mean + eps);
  for (int i = 0; i < dim; ++i) {
    out[i] = x[i] * scale * weight[i];
  }
}

void GatedActivationRow(const GatedActivationParams& params, int64_t row) {
  switch (params.activation) {
    case Activation::kSilu:
      return Gate(params, row, [](float g, float up) { return g * Sigmoid(g) * up; });
    case Activation::kGeluTanh:
      return Gate(params, row, [](float g, float up) {
        // tanh form: 0.5 (1 + tanh u) = sigmoid(2 u)
        constexpr float kTwoSqrt2OverPi = 1.59576912f;
        return g * Sigmoid(kTwoSqrt2OverPi * (g + 0.044715f * g * g * g)) * up;
      });
    case Activation::kClampedSwiglu:
      return Gate(params, row, [limit = params.limit](float gate, float up) {
        constexpr float kAlpha = 1.702f;
        const float g = gate > limit ? limit : gate;  // NaN stays
        const float high = up > limit ? limit : up;
        const float u = high < -limit ? -limit : high;
        return g * Sigmoid(kAlpha * g) * (u + 1.f);
      });
  }
}

void FillDenseKernels(CpuDenseKernels& kernels) {
  kernels.pack_panel = PackPanel;
  kernels.panel_bytes = FullPanelBytes;
  kernels.multiply = Multiply;
  kernels.scratch_bytes = MultiplyScratchBytes;
  kernels.rms_norm = RmsNormRow;
  kernels.gated_activation = GatedActivationRow;
}

}  // namespace turbomind::TM_ISA
