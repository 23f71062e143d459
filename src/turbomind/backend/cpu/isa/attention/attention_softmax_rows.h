#pragma once

// ⑦ The softmax of rows of a tile, for decode and prefill: one row at a time, or
// SoftmaxState::UpdateTile of up to four rows at once with AVX-512. One row is a chain of dependent
// instructions from its largest score to its sum. Several rows overlap and share the work that is
// done once per row. The additions and their order are the same, so the bits are the same.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

// The rows of one call. All arrays have one element per row.
struct TileRows {
  float* scores;       // [kTileTokens] each; become weights
  const float* scale;  // factor from sums to scores
  const float* shift;  // ScoreTerms::shift of each, shift_stride apart
  int shift_stride;
  SoftmaxState* state;
  float* old;   // SoftmaxState::Factors
  float* tile;  // the tile's factor times value_scale
  float value_scale;
};

// Updates one row that sees the positions [seen.begin, seen.end) of the tile. If the weights are
// not rounded, they include value_scale, and `tile` is left unchanged. REQUIRES: a nonempty range.
inline void UpdateOneRow(const TileRows& row, const Seen& seen, bool rounds_weights) {
  if (rounds_weights) {
    const auto factors =
        row.state->UpdateTile(row.scores, {*row.scale, row.shift}, seen.begin, seen.end);
    *row.old = factors.old;
    *row.tile = factors.tile * row.value_scale;
  } else {
    *row.old = row.state->Update(row.scores, {*row.scale, row.shift}, seen.begin, seen.end);
    ScaleWeights(row.scores, row.value_scale);
  }
}

#if defined(TM_ISA_avx512)

// Returns ReduceAdd(a[i % 4]) in lane i, with the same additions.
TM_HD __m512 SumOfEach(const F32x16 (&a)[4]) {
  const auto halves = [](__m512 x, __m512 y) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  const __m512 first = halves(a[0].v, a[1].v);  // 8 sums of each
  const __m512 second = halves(a[2].v, a[3].v);
  const __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                                    _mm512_shuffle_f32x4(first, second, 0xdd));
  const __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
  const __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
  const __m512i of_row = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  return _mm512_permutexvar_ps(of_row, one);
}

// Applies PowerOfTwo to each lane.
TM_HD __m512 PowersOf2(__m512 n) {
  const __mmask16 in_range = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.f), _CMP_GE_OQ);
  const __m512i exponent =
      _mm512_add_epi32(_mm512_maskz_cvtps_epi32(in_range, n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(in_range, exponent, 23));
}

// Applies SoftmaxState::UpdateTile to N rows that see all of the tile. A row with a NaN among its
// scores gets a different m than there. As there, its sum is NaN, and so is its output.
template <int N>
TM_HD void UpdateRows(const TileRows& rows) {
  static_assert(2 <= N && N <= 4);
  static_assert(sizeof(SoftmaxState) == 8);  // (m, l)
  constexpr __mmask16 kRowMask = (1 << N) - 1;
  constexpr __mmask16 kStateMask = (1 << 2 * N) - 1;
  F32x16 s[N][4];
  F32x16 max_score[4] = {Zero(), Zero(), Zero(), Zero()};
  Unroll<N>([&](auto index) __attribute__((always_inline)) {
    constexpr int r = decltype(index)::value;
    const F32x16 scale = Set1(rows.scale[r]);
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int k = decltype(i)::value;
      s[r][k] = Fma(Load(rows.scores + r * kTileTokens + 16 * k), scale,
                    Set1(rows.shift[r * rows.shift_stride + k]));
    });
    max_score[r] = Max(Max(s[r][0], s[r][1]), Max(s[r][2], s[r][3]));
  });
  const __m512 top = _mm512_maskz_roundscale_ps(0xffff, MaxOfEach(max_score).v,
                                                _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  auto* const states = reinterpret_cast<float*>(rows.state);
  const __m512 state = _mm512_maskz_loadu_ps(kStateMask, states);
  const __m512i m_at = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6);
  const __m512 m = _mm512_permutexvar_ps(m_at, state);
  const __m512 l = _mm512_permutexvar_ps(_mm512_add_epi32(m_at, _mm512_set1_epi32(1)), state);
  const __mmask16 lower = _mm512_cmp_ps_mask(top, m, _CMP_LE_OQ);
  const __m512 smaller = PowersOf2(_mm512_mask_sub_ps(_mm512_sub_ps(m, top), lower, top, m));
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 old = _mm512_mask_mov_ps(smaller, lower, one);
  const __m512 factor = _mm512_mask_mov_ps(one, lower, smaller);
  alignas(64) float tops[kLanes];
  _mm512_store_ps(tops, top);
  F32x16 sum[4] = {Zero(), Zero(), Zero(), Zero()};
  Unroll<N>([&](auto index) __attribute__((always_inline)) {
    constexpr int r = decltype(index)::value;
    const F32x16 lowered = Set1(tops[r]);
    F32x16 w[4];
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int k = decltype(i)::value;
      w[k] = Exp2(Sub(s[r][k], lowered));
      Store(rows.scores + r * kTileTokens + 16 * k, w[k]);
    });
    sum[r] = Add(Add(w[0], w[1]), Add(w[2], w[3]));
  });
  const __m512 new_l = _mm512_add_ps(_mm512_mul_ps(l, old), _mm512_mul_ps(factor, SumOfEach(sum)));
  const __m512 new_m = _mm512_mask_mov_ps(top, lower, m);
  const __m512i pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm512_mask_storeu_ps(states, kStateMask, _mm512_permutex2var_ps(new_m, pairs, new_l));
  _mm512_mask_storeu_ps(rows.old, kRowMask, old);
  _mm512_mask_storeu_ps(rows.tile, kRowMask,
                        _mm512_mul_ps(factor, _mm512_set1_ps(rows.value_scale)));
}

#endif

}  // namespace turbomind::TM_ISA
