#pragma once

// ⑦ Online softmax of a block of query rows of attention over latents, one row per lane. m is an
// integer, so that states are scaled by powers of two, as in attention_softmax.h.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

static_assert(kLatentLanes == kLanes);

// Returns 2^n of integers n <= 0, and 0 if n is below -126 or NaN.
TM_HD F32x16 PowersOfTwo(F32x16 n) {
  const I32x16 bits = ShiftLeft<23>(Add(ToInt(n), Set1Int(127)));
  return Select(Less(Set1(-127.f), n), FromBits(bits), Zero());
}

// Returns the least integers that are at least x.
TM_HD F32x16 RoundUp(F32x16 x) {
  const F32x16 truncated = ToFloat(Truncate(x));
  const F32x16 up = Select(Less(truncated, x), Add(truncated, Set1(1.f)), truncated);
  const F32x16 magnitude = FromBits(And(Bits(x), Set1Int(0x7fffffff)));
  return Select(Less(Set1(0x1p23f), magnitude), x, up);  // those have no fraction
}

// The positions [begin, end) of a tile that each row of a block sees.
struct BlockSeen {
  alignas(64) int32_t begin[kLanes];
  alignas(64) int32_t end[kLanes];
  Seen some;  // by any row; empty if no row sees the tile
  bool all;   // whether every row sees all of `some`
};

// The state of a block: m, l and o[rank], each with a run of lanes.
struct LatentState {
  float* at;

  TM_HD float* m() const { return at; }
  TM_HD float* l() const { return at + kLanes; }
  TM_HD float* o() const { return at + kStateHeader * kLanes; }

  void Clear(int rank) const {
    Store(m(), Set1(-__builtin_inff()));
    for (int i = 1; i < kStateHeader + rank; ++i) {
      Store(at + i * kLanes, Zero());
    }
  }

  // Replaces the sums of a tile, [kTileTokens, lanes], with 2^(scale * sum - m); those that a row
  // does not see with 0. Returns the factors of o. A NaN that a row sees makes its state NaN.
  TM_HD F32x16 Update(float* sums, F32x16 scale, const BlockSeen& seen) const {
    const F32x16 hidden = Set1(-__builtin_inff());
    F32x16 top = hidden;
    for (int t = seen.some.begin; t < seen.some.end; ++t) {
      F32x16 score = Mul(Load(sums + t * kLanes), scale);
      if (!seen.all) {
        const I32x16 at_token = Set1Int(t);
        score = Select(Less(at_token, LoadInt(seen.end)), score, hidden);
        score = Select(Less(at_token, LoadInt(seen.begin)), hidden, score);
      }
      Store(sums + t * kLanes, score);
      top = Max(score, top);
    }
    const F32x16 old = Load(m());
    const F32x16 m_new = Max(RoundUp(top), old);
    const F32x16 correction = PowersOfTwo(Sub(old, m_new));
    const F32x16 shift = Select(Less(hidden, m_new), m_new, Zero());
    F32x16 sum = Zero();
    for (int t = seen.some.begin; t < seen.some.end; ++t) {
      const F32x16 weight = Exp2(Sub(Load(sums + t * kLanes), shift));
      Store(sums + t * kLanes, weight);
      sum = Add(sum, weight);
    }
    Store(m(), m_new);
    Store(l(), Fma(Load(l()), correction, sum));
    return correction;
  }

  void Merge(const LatentState& later, int rank) const {
    const F32x16 own = Load(m());
    const F32x16 other = Load(later.m());
    const F32x16 m_new = Max(own, other);
    const F32x16 a = PowersOfTwo(Sub(own, m_new));
    const F32x16 b = PowersOfTwo(Sub(other, m_new));
    Store(m(), m_new);
    for (int i = 1; i < kStateHeader + rank; ++i) {
      const float* from = later.at + i * kLanes;
      Store(at + i * kLanes, Fma(Load(at + i * kLanes), a, Mul(Load(from), b)));
    }
  }
};

}  // namespace turbomind::TM_ISA
