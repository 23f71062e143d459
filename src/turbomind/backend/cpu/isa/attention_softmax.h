#pragma once

// ⑦ Online softmax of one query head: tiles into a split, splits into the result. The same code for
// prefill and decode, so the same bits.

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

inline constexpr float kLog2E = 1.44269504f;

// (m, l) of a state; o is elsewhere.
struct SoftmaxState {
  float m = -__builtin_inff();
  float l = 0.f;

  // Turns the scores of a tile (positions [begin, end) of it are visible) into 2^(score - m) in
  // place and returns what o has to be multiplied with. A NaN score makes the state NaN.
  TM_HD float Update(float* scores, float scale, int begin, int end) {
    const F32x16 factor = Set1(scale);
    const F32x16 hidden = Set1(-__builtin_inff());
    F32x16 s[4];
    for (int i = 0; i < 4; ++i) {
      s[i] = Select(LaneRange(begin - 16 * i, end - 16 * i), Mul(Load(scores + 16 * i), factor),
                    hidden);
    }
    const float largest = ReduceMax(Max(Max(s[0], s[1]), Max(s[2], s[3])));
    const float m_new = largest <= m ? m : largest;
    const F32x16 shift = Set1(m_new);
    for (int i = 0; i < 4; ++i) {
      s[i] = Exp2(Sub(s[i], shift));
      Store(scores + 16 * i, s[i]);
    }
    const float correction = largest <= m ? 1.f : Exp2Scalar(m - m_new);
    l = l * correction + ReduceAdd(Add(Add(s[0], s[1]), Add(s[2], s[3])));
    m = m_new;
    return correction;
  }

  // Adds a later split's state; o and other_o have head_dim values.
  TM_HD void Merge(const SoftmaxState& other, float* o, const float* other_o, int head_dim) {
    if (other.l == 0.f) {
      return;
    }
    if (l == 0.f) {
      *this = other;
      for (int d = 0; d < head_dim; d += kLanes) {
        Store(o + d, Load(other_o + d));
      }
      return;
    }
    const float m_new = m > other.m ? m : other.m;
    const float a = Exp2Scalar(m - m_new);
    const float b = Exp2Scalar(other.m - m_new);
    m = m_new;
    l = l * a + other.l * b;
    for (int d = 0; d < head_dim; d += kLanes) {
      Store(o + d, Fma(Load(o + d), Set1(a), Mul(Load(other_o + d), Set1(b))));
    }
  }

  // The factor that turns o into the output. A sink, lowered by `shift`, adds weight and no value.
  TM_HD float Finish(const float* sink, float shift, float value_factor) {
    if (l == 0.f) {
      return 0.f;
    }
    float correction = 1.f;
    if (sink != nullptr) {
      const float logit = (*sink - shift) * kLog2E;
      const float m_new = m > logit ? m : logit;
      correction = Exp2Scalar(m - m_new);
      l = l * correction + Exp2Scalar(logit - m_new);
    }
    return correction * value_factor / l;
  }
};

// Σ q in one fixed order: the zero points' share of a score.
TM_HD float SumRow(const float* q, int head_dim) {
  F32x16 sum = Zero();
  for (int d = 0; d < head_dim; d += kLanes) {
    sum = Add(sum, Load(q + d));
  }
  return ReduceAdd(sum);
}

// From sums over codes to scores in units of log2: softmax scale times the keys' factor g.
TM_HD float ScoreScale(const KvHead& kv, float softmax_scale) {
  const float* g = kv.layer->g[0];
  return (g != nullptr ? softmax_scale * g[kv.head] : softmax_scale) * kLog2E;
}

// out = o * factor; adding zero turns -0 into 0, as hidden tokens may have done on the way.
TM_HD void WriteOutput(const float* o, int head_dim, float factor, float* out) {
  for (int d = 0; d < head_dim; d += kLanes) {
    Store(out + d, Fma(Load(o + d), Set1(factor), Zero()));
  }
}

}  // namespace turbomind::TM_ISA
