// ⑥⑦ Norms, activations and soft caps of one row, with the same bits in every instruction set. They
// use the lanes of simd.h, or loops over lanes that the compiler vectorizes, without contraction.

#include "turbomind/backend/cpu/isa/dense/dense.h"

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/isa/simd/simd_math.h"
#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {
namespace {

constexpr int kSums = 64;  // four 512-bit sums hide the latency of addition

// Returns tanh(x) = 1 - 2 / (exp(2x) + 1), with an absolute error below 2e-7.
TM_HD F32x16 Tanh(F32x16 x) {
  const F32x16 one = Set1(1.f);
  return Sub(one, Div(Set1(2.f), Add(Exp(Mul(x, Set1(2.f))), one)));
}

// Returns erf(x) by formula 7.1.26 of Abramowitz and Stegun, with an absolute error below 2e-7.
TM_HD F32x16 Erf(F32x16 x) {
  const F32x16 one = Set1(1.f);
  const F32x16 size = Max(x, Mul(x, Set1(-1.f)));
  const F32x16 t = Div(one, Add(one, Mul(Set1(0.3275911f), size)));
  F32x16 p = Set1(1.061405429f);
  constexpr float kTerms[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  for (const float term : kTerms) {
    p = Add(Mul(p, t), Set1(term));
  }
  const F32x16 tail = Mul(Mul(p, t), Exp(Mul(Mul(size, size), Set1(-1.f))));
  const F32x16 erf = Sub(one, tail);
  return FromBits(Or(Bits(erf), And(Bits(x), Set1Int(INT32_MIN))));
}

// Returns the sum of fn(x[i]) in one fixed order.
template <class Fn>
TM_HD float SumLanes(const float* x, int dim, Fn fn) {
  float lanes[kSums] = {};
  int i = 0;
  for (; i + kSums <= dim; i += kSums) {
    for (int j = 0; j < kSums; ++j) {
      lanes[j] += fn(x[i + j]);
    }
  }
  for (int j = 0; i + j < dim; ++j) {
    lanes[j] += fn(x[i + j]);
  }
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      lanes[j] += lanes[j + width];
    }
  }
  return lanes[0];
}

// Loads the first `count` values at p and zeros.
TM_HD F32x16 LoadRest(const float* p, int64_t count) {
  float lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
  return Load(lanes);
}

// Computes out[i] = fn(in[i]...) for `count` values.
template <class Fn, class... In>
TM_HD void Map(float* out, int64_t count, Fn fn, const In*... in) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Store(out + i, fn(Load(in + i)...));
  }
  if (i < count) {
    float rest[kLanes];
    Store(rest, fn(LoadRest(in + i, count - i)...));
    __builtin_memcpy(out + i, rest, static_cast<size_t>(count - i) * sizeof(float));
  }
}

// 16 elements each of gate and up.
struct GateAndUp {
  F32x16 gate;
  F32x16 up;
};
TM_HD GateAndUp ReadPairs(const float* in) {
  return {FromBits(LoadEverySecond<0>(in)), FromBits(LoadEverySecond<1>(in))};
}

// Computes out[i] = fn(gate[i], up[i]) for one row.
template <class Fn>
TM_HD void Gate(const GatedActivationParams& params, int64_t row, Fn fn) {
  const int64_t dim = params.dim;
  const float* in = params.gate_up + (params.gated ? 2 : 1) * row * dim;
  const float* other = params.other != nullptr ? params.other + row * params.other_stride : nullptr;
  float* out = params.out + row * dim;
  const float scale = params.row_scales != nullptr ? params.row_scales[row] : 1.f;
  const auto scaled = [&](F32x16 gate, F32x16 up) {
    return params.row_scales == nullptr
               ? fn(gate, up)
               : fn(Mul(gate, Set1(scale)), params.gated ? Mul(up, Set1(scale)) : up);
  };
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    GateAndUp x = {Zero(), Set1(1.f)};
    if (params.interleaved) {
      x = ReadPairs(in + 2 * i);
    } else {
      x.gate = Load(in + i);
      x.up = params.gated ? Load(in + dim + i) : other != nullptr ? Load(other + i) : x.up;
    }
    Store(out + i, scaled(x.gate, x.up));
  }
  const int rest = static_cast<int>(dim - i);
  if (rest == 0) {
    return;
  }
  float gate[kLanes] = {};
  float up[kLanes] = {};
  for (int k = 0; k < rest; ++k) {
    gate[k] = params.interleaved ? in[2 * (i + k)] : in[i + k];
    up[k] = other != nullptr ? other[i + k] : 1.f;
    if (params.gated) {
      up[k] = params.interleaved ? in[2 * (i + k) + 1] : in[dim + i + k];
    }
  }
  Store(gate, scaled(Load(gate), Load(up)));
  __builtin_memcpy(out + i, gate, rest * sizeof(float));
}

}  // namespace

void NormRow(const NormParams& params, int64_t row) {
  const int dim = params.dim;
  const float* x = params.x + row * params.Stride();
  float* out = params.out + row * params.Stride();
  const float* weight = params.weight;
  const float count = static_cast<float>(dim);
  float mean = 0.f;
  float squares;
  if (params.centered) {
    mean = SumLanes(x, dim, [](float v) { return v; }) / count;
    squares = SumLanes(x, dim, [mean](float v) { return (v - mean) * (v - mean); });
  } else {
    squares = SumLanes(x, dim, [](float v) { return v * v; });
  }
  const float scale = 1.f / __builtin_sqrtf(squares / count + params.eps);
  if (params.centered) {
    for (int i = 0; i < dim; ++i) {
      out[i] = (x[i] - mean) * scale * weight[i];
    }
  } else {
    for (int i = 0; i < dim; ++i) {
      out[i] = x[i] * scale * weight[i];
    }
  }
  if (params.bias != nullptr) {
    for (int i = 0; i < dim; ++i) {
      out[i] += params.bias[i];
    }
  }
}

void GatedNormRow(const GatedNormParams& params, int64_t row) {
  const float* x = params.x + row * params.dim;
  const float* z = params.z + row * params.z_stride;
  float* out = params.out + row * params.dim;
  if (params.gate_first || params.weight == nullptr) {
    Map(
        out, params.dim, [](F32x16 value, F32x16 gate) { return Mul(value, Silu(gate)); }, x, z);
    x = out;
  }
  if (params.weight == nullptr) {
    return;
  }
  for (int first = 0; first < params.dim; first += params.group) {
    const float squares = SumLanes(x + first, params.group, [](float v) { return v * v; });
    const float count = static_cast<float>(params.group);
    const F32x16 scale = Set1(1.f / __builtin_sqrtf(squares / count + params.eps));
    const auto normed = [&](F32x16 value, F32x16 weight) { return Mul(Mul(value, scale), weight); };
    const float* weight = params.weight + first;
    if (params.gate_first) {
      Map(out + first, params.group, normed, x + first, weight);
    } else {
      const auto gated = [&](F32x16 value, F32x16 by, F32x16 gate) {
        return Mul(normed(value, by), Silu(gate));
      };
      Map(out + first, params.group, gated, x + first, weight, z + first);
    }
  }
}

void SigmoidGateRange(const SigmoidGateParams& params, int64_t begin, int64_t end) {
  float* x = params.x + begin;
  Map(
      x, end - begin, [](F32x16 value, F32x16 gate) { return Mul(value, Sigmoid(gate)); }, x,
      params.gate + begin);
}

void SoftCapRange(const SoftCapParams& params, int64_t begin, int64_t end) {
  const auto capped = [&params](F32x16 x) {
    const F32x16 scaled = Mul(x, Set1(params.scale));
    return params.cap == 0.f ? scaled
                             : Mul(Tanh(Mul(scaled, Set1(1.f / params.cap))), Set1(params.cap));
  };
  Map(params.x + begin, end - begin, capped, params.x + begin);
}

void GatedActivationRow(const GatedActivationParams& params, int64_t row) {
  switch (params.activation) {
    case Activation::kSilu:
      return Gate(params, row, [](F32x16 g, F32x16 up) { return Mul(Silu(g), up); });
    case Activation::kGeluTanh:
      return Gate(params, row, [](F32x16 g, F32x16 up) {
        // tanh form: 0.5 (1 + tanh u) = sigmoid(2 u)
        const F32x16 cube = Mul(Mul(Mul(Set1(0.044715f), g), g), g);
        const F32x16 two_u = Mul(Set1(1.59576912f), Add(g, cube));  // 2 sqrt(2 / pi)
        return Mul(Mul(g, Sigmoid(two_u)), up);
      });
    case Activation::kGelu:
      return Gate(params, row, [](F32x16 g, F32x16 up) {
        const F32x16 erf = Erf(Mul(g, Set1(0.707106781f)));
        return Mul(Mul(Mul(g, Set1(0.5f)), Add(Set1(1.f), erf)), up);
      });
    case Activation::kRelu2:
      return Gate(params, row, [](F32x16 g, F32x16 up) {
        const F32x16 positive = Max(Zero(), g);  // NaN remains NaN
        return Mul(Mul(positive, positive), up);
      });
    case Activation::kClampedSwiglu:
      return Gate(params, row, [limit = params.limit](F32x16 gate, F32x16 up) {
        const F32x16 upper = Set1(limit);
        const F32x16 lower = Set1(-limit);
        const F32x16 g = Min(upper, gate);  // NaN remains NaN
        const F32x16 u = Max(lower, Min(upper, up));
        const F32x16 swish = Mul(g, Sigmoid(Mul(Set1(1.702f), g)));
        return Mul(swish, Add(u, Set1(1.f)));
      });
  }
}

}  // namespace turbomind::TM_ISA
