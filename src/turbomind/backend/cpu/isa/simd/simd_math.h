#pragma once

// ⑥⑦ Functions of sixteen FP32 lanes, with the same bits in every instruction set.

#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

// Returns exp(x) with x clipped to [-87, 88], or NaN; relative error below 2e-7.
TM_HD F32x16 Exp(F32x16 x) {
  const F32x16 log2e = Set1(1.44269504f);
  const F32x16 ln2_high = Set1(0.693359375f);  // few bits: n * ln2_high is exact
  const F32x16 ln2_low = Set1(-2.12194440e-4f);
  const F32x16 magic = Set1(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
  const F32x16 clipped = Min(Set1(88.f), Max(Set1(-87.f), x));
  const F32x16 n = Sub(Add(Mul(clipped, log2e), magic), magic);
  const F32x16 r = Sub(Sub(clipped, Mul(n, ln2_high)), Mul(n, ln2_low));
  F32x16 p = Set1(1.f / 5040);  // Taylor, |r| <= ln 2 / 2
  constexpr float kTerms[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
  for (const float term : kTerms) {
    p = Add(Mul(p, r), Set1(term));
  }
  return Mul(p, FromBits(ShiftLeft<23>(Add(ToInt(n), Set1Int(127)))));
}

TM_HD F32x16 Sigmoid(F32x16 x) {
  const F32x16 one = Set1(1.f);
  return Div(one, Add(one, Exp(Mul(x, Set1(-1.f)))));
}

TM_HD F32x16 Silu(F32x16 x) { return Mul(x, Sigmoid(x)); }

// Returns log(1 + exp(x)); relative error below 5e-7. The logarithm is 2 atanh(u / (2 + u)), where
// u is exp(-|x|).
TM_HD F32x16 Softplus(F32x16 x) {
  const F32x16 u = Exp(Min(x, Mul(x, Set1(-1.f))));
  const F32x16 s = Div(u, Add(u, Set1(2.f)));
  const F32x16 square = Mul(s, s);
  F32x16 p = Set1(1.f / 15);  // s <= 1/3
  constexpr float kTerms[] = {1.f / 13, 1.f / 11, 1.f / 9, 1.f / 7, 1.f / 5, 1.f / 3, 1.f};
  for (const float term : kTerms) {
    p = Fma(p, square, Set1(term));
  }
  return Add(Max(Zero(), x), Mul(Mul(Set1(2.f), s), p));
}

}  // namespace turbomind::TM_ISA
