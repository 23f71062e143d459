#pragma once

// ⑥⑦ The rotation of K and of latents.

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/kv/layout.h"

namespace turbomind::TM_ISA {

inline constexpr int32_t kSign = INT32_MIN;
alignas(64) inline constexpr int32_t kOddSigns[4][16] = {
    {0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign},
    {0, 0, kSign, kSign, 0, 0, kSign, kSign, 0, 0, kSign, kSign, 0, 0, kSign, kSign},
    {0, 0, 0, 0, kSign, kSign, kSign, kSign, 0, 0, 0, 0, kSign, kSign, kSign, kSign},
    {0, 0, 0, 0, 0, 0, 0, 0, kSign, kSign, kSign, kSign, kSign, kSign, kSign, kSign},
};

// Replaces the lanes (i, i + h) with their sum and their difference.
template <int kStage>
TM_HD F32x16 Butterfly(F32x16 x) {
  return Add(SwapLanes<1 << kStage>(x), FromBits(Xor(Bits(x), LoadInt(kOddSigns[kStage]))));
}

// Applies the normalized Walsh-Hadamard transform to every run of `size` values, a power of two
// from 16 on: stages h = 1, 2, 4, ..., then one multiplication by 1 / sqrt(size).
TM_HD void HadamardRow(float* x, int n, int size) {
  for (int d = 0; d < n; d += kLanes) {
    F32x16 v = Load(x + d);
    v = Butterfly<0>(v);
    v = Butterfly<1>(v);
    v = Butterfly<2>(v);
    v = Butterfly<3>(v);
    Store(x + d, v);
  }
  for (int h = kLanes; h < size; h *= 2) {
    for (int base = 0; base < n; base += 2 * h) {
      for (int d = base; d < base + h; d += kLanes) {
        const F32x16 a = Load(x + d);
        const F32x16 b = Load(x + d + h);
        Store(x + d, Add(a, b));
        Store(x + d + h, Sub(a, b));
      }
    }
  }
  const F32x16 norm = Set1(RotationNorm(size));
  for (int d = 0; d < n; d += kLanes) {
    Store(x + d, Mul(Load(x + d), norm));
  }
}

// Applies the stages h, 2h, ... to each lane of `x` [n, kLanes], kStages of them, with 2^kStages
// runs of lanes in registers. Then it multiplies by `factor`.
template <int kStages>
TM_HD void HadamardStages(float* x, int n, int h, float factor) {
  constexpr int kCount = 1 << kStages;
  for (int base = 0; base < n; base += kCount * h) {
    for (float* at = x + base * kLanes; at != x + (base + h) * kLanes; at += kLanes) {
      F32x16 v[kCount];
      for (int i = 0; i < kCount; ++i) {
        v[i] = Load(at + i * h * kLanes);
      }
      for (int bit = 1; bit < kCount; bit *= 2) {
        for (int i = 0; i < kCount; ++i) {
          if ((i & bit) == 0) {
            const F32x16 a = v[i];
            v[i] = Add(a, v[i + bit]);
            v[i + bit] = Sub(a, v[i + bit]);
          }
        }
      }
      for (int i = 0; i < kCount; ++i) {
        Store(at + i * h * kLanes, Mul(v[i], Set1(factor)));
      }
    }
  }
}

// Applies the transform to each lane of `x` [n, kLanes]. A lane gets the bits of HadamardRow.
TM_HD void HadamardLanes(float* x, int n, int size) {
  const float norm = RotationNorm(size);
  int h = 1;
  for (; h * 8 <= size; h *= 8) {
    HadamardStages<3>(x, n, h, h * 8 == size ? norm : 1.f);
  }
  if (h * 4 == size) {
    HadamardStages<2>(x, n, h, norm);
  } else if (h * 2 == size) {
    HadamardStages<1>(x, n, h, norm);
  }
}

}  // namespace turbomind::TM_ISA
