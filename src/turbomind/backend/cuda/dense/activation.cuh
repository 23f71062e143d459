#pragma once

// The activation of a gate and its up value.

#include <cmath>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

TM_DEVICE float ActivateGate(const GatedActivationParams& p, float gate, float up) {
  if (p.activation == Activation::kSilu) {
    return gate * Sigmoid(gate) * up;
  }
  if (p.activation == Activation::kGeluTanh) {
    constexpr float kTwoSqrt2OverPi = 1.59576912f;  // 0.5 (1 + tanh u) = sigmoid(2 u)
    // Rounded, because exp turns an error in the argument's last bit into an error that grows with
    // the argument.
    const float cubic = MulRounded(0.044715f * gate * gate, gate);
    return gate * Sigmoid(kTwoSqrt2OverPi * (gate + cubic)) * up;
  }
  if (p.activation == Activation::kGelu) {
    return 0.5f * gate * (1.f + erff(gate * 0.707106781f)) * up;
  }
  if (p.activation == Activation::kRelu2) {
    const float positive = gate < 0.f ? 0.f : gate;  // NaN stays NaN
    return positive * positive * up;
  }
  constexpr float kAlpha = 1.702f;
  const float g = gate > p.limit ? p.limit : gate;  // NaN stays NaN
  const float high = up > p.limit ? p.limit : up;
  const float u = high < -p.limit ? -p.limit : high;
  return g * Sigmoid(kAlpha * g) * (u + 1.f);
}

}  // namespace turbomind::cuda
