#pragma once

// ⑦ Online softmax of one query head: merges tiles into a split and splits into the result. Prefill
// and decode share this code, so they return the same bits.

#include <cstdint>

#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

inline constexpr float kLog2E = 1.44269504f;

// The scores of a tile; hidden positions are -infinity.
struct TileScores {
  F32x16 s[4];
  float largest;
};

// How the sums of a tile become scores: scale * sum + shift of the run of 16 tokens.
struct ScoreTerms {
  float scale;
  const float* shift;  // [kTileTokens / 16] q · K offset; zeros if blocks have none
};
alignas(64) inline constexpr float kNoShift[kLanes] = {};

TM_HD TileScores ReadScores(const float* scores, const ScoreTerms& terms, int begin, int end) {
  const F32x16 factor = Set1(terms.scale);
  const F32x16 hidden = Set1(-__builtin_inff());
  TileScores tile;
  const bool all = begin == 0 && end == 4 * kLanes;
  for (int i = 0; i < 4; ++i) {
    tile.s[i] = Fma(Load(scores + 16 * i), factor, Set1(terms.shift[i]));
    if (!all) {
      tile.s[i] = Select(LaneRange(begin - 16 * i, end - 16 * i), tile.s[i], hidden);
    }
  }
  tile.largest = ReduceMax(Max(Max(tile.s[0], tile.s[1]), Max(tile.s[2], tile.s[3])));
  return tile;
}

// Replaces the sums of a tile with cap * tanh(score / cap) in units of log2. `cap` is in units of
// e. Hidden positions get some value, too.
TM_HD void CapScores(float* scores, const ScoreTerms& terms, float cap) {
  const F32x16 one = Set1(1.f);
  const F32x16 largest = Set1(cap * kLog2E);
  // tanh(x) = (1 - t) / (1 + t) for x >= 0 and t = 2^(-2 x log2(e)). `scale` contains log2(e).
  const F32x16 factor = Set1(2.f * terms.scale / cap);
  const I32x16 sign = Set1Int(INT32_MIN);
  for (int i = 0; i < kTileTokens; i += kLanes) {
    const F32x16 shift = Set1(2.f * terms.shift[i / kLanes] / cap);
    const I32x16 x = Bits(Fma(Load(scores + i), factor, shift));
    const F32x16 t = Exp2(FromBits(Or(x, sign)));  // -|x|
    const F32x16 tanh = Div(Sub(one, t), Add(one, t));
    Store(scores + i, Mul(FromBits(Or(Bits(tanh), And(x, sign))), largest));
  }
}

// Writes 2^(score - shift) to weights and returns the sum of the weights.
TM_HD float StoreWeights(const TileScores& tile, float shift, float* weights) {
  const F32x16 lowered = Set1(shift);
  F32x16 sum[2];
  for (int half = 0; half < 2; ++half) {
    F32x16 w[2] = {Sub(tile.s[2 * half], lowered), Sub(tile.s[2 * half + 1], lowered)};
    Exp2All(w);
    Store(weights + 32 * half, w[0]);
    Store(weights + 32 * half + 16, w[1]);
    sum[half] = Add(w[0], w[1]);
  }
  return ReduceAdd(Add(sum[0], sum[1]));
}

// Returns 2^n for an integer n <= 0, and 0 if n is below -126 or NaN.
TM_HD float PowerOfTwo(float n) {
  if (!(n >= -126.f)) {
    return 0.f;
  }
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return power;
}

// The state (m, l); o is stored elsewhere. m is an integer, so that states are scaled by powers of
// two.
struct SoftmaxState {
  float m = -__builtin_inff();
  float l = 0.f;

  // Replaces the scores of a tile, of which positions [begin, end) are visible, with 2^(score - m).
  // Returns the factor of o. A NaN score makes the state NaN.
  TM_HD float Update(float* scores, const ScoreTerms& terms, int begin, int end) {
    const TileScores tile = ReadScores(scores, terms, begin, end);
    const float top = __builtin_ceilf(tile.largest);
    const float m_new = top <= m ? m : top;
    const float correction = PowerOfTwo(m - m_new);
    l = l * correction + StoreWeights(tile, m_new, scores);
    m = m_new;
    return correction;
  }

  // Replaces the scores with 2^(score - n), where n is the tile's own largest score, rounded up.
  // The largest weight is in (1/2, 1], and o becomes old * o + tile * (sum of the tile).
  struct Factors {
    float old;
    float tile;
  };
  TM_HD Factors UpdateTile(float* scores, const ScoreTerms& terms, int begin, int end) {
    const TileScores tile = ReadScores(scores, terms, begin, end);
    const float top = __builtin_ceilf(tile.largest);
    const bool lower = top <= m;
    const float smaller = PowerOfTwo(lower ? top - m : m - top);
    const Factors factors = lower ? Factors{1.f, smaller} : Factors{smaller, 1.f};
    l = l * factors.old + factors.tile * StoreWeights(tile, top, scores);
    m = lower ? m : top;
    return factors;
  }

  // Merges the state of a later split into this one. o and other_o have head_dim values.
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
    const float a = PowerOfTwo(m - m_new);
    const float b = PowerOfTwo(other.m - m_new);
    m = m_new;
    l = l * a + other.l * b;
    for (int d = 0; d < head_dim; d += kLanes) {
      Store(o + d, Fma(Load(o + d), Set1(a), Mul(Load(other_o + d), Set1(b))));
    }
  }

  // Returns the factor that turns o into the output. A sink, lowered by `shift`, adds weight but no
  // value.
  TM_HD float Finish(const float* sink, float shift, float value_scale) {
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
    return correction * value_scale / l;
  }
};

// Returns Σ q in one fixed order, which the zero points of the keys are multiplied with.
TM_HD float SumRow(const float* q, int head_dim) {
  F32x16 sum = Zero();
  for (int d = 0; d < head_dim; d += kLanes) {
    sum = Add(sum, Load(q + d));
  }
  return ReduceAdd(sum);
}

// Returns x · y in one fixed order.
TM_HD float DotRow(const float* x, const float* y, int n) {
  F32x16 sum = Zero();
  for (int d = 0; d < n; d += kLanes) {
    sum = Fma(Load(x + d), Load(y + d), sum);
  }
  return ReduceAdd(sum);
}

// Returns the factor from sums over codes to scores in units of log2: softmax scale times the keys'
// global scale.
TM_HD float ScoreScale(const KvHead& kv, float softmax_scale) {
  const float* scales = kv.layer->global_scale[0];
  return (scales != nullptr ? softmax_scale * scales[kv.head] : softmax_scale) * kLog2E;
}

// Writes out = o * factor. Adding zero turns -0, which hidden tokens can produce, into 0.
TM_HD void WriteOutput(const float* o, int head_dim, float factor, float* out) {
  for (int d = 0; d < head_dim; d += kLanes) {
    Store(out + d, Fma(Load(o + d), Set1(factor), Zero()));
  }
}

}  // namespace turbomind::TM_ISA
