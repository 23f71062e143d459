#pragma once

// ⑦ The softmax between the two products of prefill attention in BF16: turns scores in FP32 into
// weights in BF16, for four rows at a time.
//
// The sum l adds the rounded weights, the ones that multiply the values: o / l is then an average
// of values, and the error of a weight counts only as far as its value differs from the average.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_softmax_rows.h"

namespace turbomind::TM_ISA {

inline constexpr int kRowsAtOnce = 4;

// Returns 2^x with a relative error below 8e-5, 1/25 of that of rounding to BF16. The result is 0
// for -infinity and NaN for NaN.
TM_HD __m512 Exp2ForBf16(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.07802452147006989f);  // the least error on [0, 1]
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.22606715559959412f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6958335638046265f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999251961708069f));
  return _mm512_scalef_ps(p, x);
}

// Four adjacent rows of a block.
struct FourRows {
  const float* scores;  // [4][kTileTokens] sums of products
  uint16_t* weights;    // [4][kTileTokens] BF16
  SoftmaxState* state;  // [4]
  float* o;             // [4][head_dim], scaled if the state's m grows
  int head_dim;
};

struct ViewScales {
  float score;  // factor from sums to scores, above zero
  float value;  // factor of the weights, above zero; not part of l
};

// The states of four rows, in lanes 0 to 3.
struct FourStates {
  __m512 m;
  __m512 l;

  TM_HD static FourStates Load(const SoftmaxState* state) {
    const __m512 both = _mm512_maskz_loadu_ps(0xff, state);
    const __m512i m_at = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6);
    return {_mm512_permutexvar_ps(m_at, both),
            _mm512_permutexvar_ps(_mm512_add_epi32(m_at, _mm512_set1_epi32(1)), both)};
  }
  TM_HD void Store(SoftmaxState* state) const {
    const __m512i pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm512_mask_storeu_ps(state, 0xff, _mm512_permutex2var_ps(m, pairs, l));
  }
};

TM_HD void ScaleRows(const FourRows& rows, const float* factors) {
  for (int r = 0; r < kRowsAtOnce; ++r) {
    float* o = rows.o + r * rows.head_dim;
    for (int d = 0; d < rows.head_dim; d += kLanes) {
      Store(o + d, Mul(Load(o + d), Set1(factors[r])));
    }
  }
}

// Rounds the weights of one row and returns the sums of four in each lane.
TM_HD F32x16 StoreRowWeights(const F32x16 (&w)[4], uint16_t* to) {
  const __m512bh first = _mm512_cvtne2ps_pbh(w[1].v, w[0].v);
  const __m512bh second = _mm512_cvtne2ps_pbh(w[3].v, w[2].v);
  _mm512_store_si512(to, (__m512i)first);
  _mm512_store_si512(to + 32, (__m512i)second);
  const auto ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  return {_mm512_dpbf16_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), first, ones), second, ones)};
}

// Loads the scores, where those of hidden tokens become -infinity. Returns the largest of each row
// in lanes 0 to 3. `seen` is not read if every row sees all of the tile (kAll).
template <bool kAll>
TM_HD F32x16 LoadFour(const FourRows& rows, const Seen* seen, F32x16 (&s)[kRowsAtOnce][4]) {
  F32x16 largest[kRowsAtOnce];
  Unroll<kRowsAtOnce>([&](auto index) __attribute__((always_inline)) {
    constexpr int r = decltype(index)::value;
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int k = decltype(i)::value;
      s[r][k] = Load(rows.scores + r * kTileTokens + 16 * k);
      if constexpr (!kAll) {
        s[r][k] = Select(LaneRange(seen[r].begin - 16 * k, seen[r].end - 16 * k), s[r][k],
                         Set1(-__builtin_inff()));
      }
    });
    largest[r] = Max(Max(s[r][0], s[r][1]), Max(s[r][2], s[r][3]));
  });
  return MaxOfEach(largest);
}

// Rounds the largest scores up. A row that sees nothing gets a finite number: m - m would be NaN.
template <bool kAll>
TM_HD __m512 TopsOf(F32x16 largest, const Seen* seen) {
  const __m512 top =
      _mm512_maskz_roundscale_ps(0xffff, largest.v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  if constexpr (kAll) {
    return top;
  }
  alignas(64) float least[kLanes] = {};
  for (int r = 0; r < kRowsAtOnce; ++r) {
    least[r] = seen[r].begin < seen[r].end ? -__builtin_inff() : -0x1p127f;
  }
  return _mm512_max_ps(top, _mm512_load_ps(least));
}

// Stores 2^(scale * s - m) of each row as weights. Returns the sums of the rounded weights, without
// the factor of the values, in lanes 0 to 3.
TM_HD __m512 StoreFour(const FourRows& rows, const F32x16 (&s)[kRowsAtOnce][4], __m512 m,
                       const ViewScales& scales) {
  alignas(64) float lowered[kLanes];
  _mm512_store_ps(lowered, _mm512_sub_ps(_mm512_setzero_ps(), m));
  const F32x16 scale = Set1(scales.score);
  F32x16 sum[kRowsAtOnce];
  Unroll<kRowsAtOnce>([&](auto index) __attribute__((always_inline)) {
    constexpr int r = decltype(index)::value;
    F32x16 w[4];
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int k = decltype(i)::value;
      w[k].v = Exp2ForBf16(Fma(s[r][k], scale, Set1(lowered[r])).v);
      if (scales.value != 1.f) {
        w[k] = Mul(w[k], Set1(scales.value));
      }
    });
    sum[r] = StoreRowWeights(w, rows.weights + r * kTileTokens);
  });
  return _mm512_mul_ps(SumOfEach(sum), _mm512_set1_ps(1.f / scales.value));
}

// Updates four rows. `seen` has what each row sees, unless all of them see all of the tile (kAll).
// A row that sees nothing gets weights of zero and keeps its sums. A row with a NaN among the
// scores that it sees gets a sum of NaN.
template <bool kAll>
TM_HD void UpdateFourRows(const FourRows& rows, const Seen* seen, const ViewScales& scales) {
  F32x16 s[kRowsAtOnce][4];
  const F32x16 largest = Mul(LoadFour<kAll>(rows, seen, s), Set1(scales.score));
  const __m512 top = TopsOf<kAll>(largest, seen);
  const FourStates old = FourStates::Load(rows.state);
  const __mmask16 lower = _mm512_cmp_ps_mask(top, old.m, _CMP_LE_OQ);
  FourStates next;
  next.m = _mm512_mask_mov_ps(top, lower, old.m);
  const __m512 factor =
      _mm512_mask_mov_ps(PowersOf2(_mm512_sub_ps(old.m, next.m)), lower, _mm512_set1_ps(1.f));
  next.l = _mm512_fmadd_ps(old.l, factor, StoreFour(rows, s, next.m, scales));
  next.Store(rows.state);
  if ((lower & 0xf) != 0xf) {
    alignas(64) float factors[kLanes];
    _mm512_store_ps(factors, factor);
    ScaleRows(rows, factors);
  }
}

}  // namespace turbomind::TM_ISA
