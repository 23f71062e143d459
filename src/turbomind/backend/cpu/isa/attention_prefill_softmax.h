#pragma once

// ⑦ The softmax of a prefill tile: scores of a block of query rows → weights. Rows that see all of
// the tile go four at a time with AVX-512: one row is a chain of dependent instructions from its
// largest score to its sum, four of them overlap and share what is done once per row.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention_prefill_block.h"
#include "turbomind/backend/cpu/isa/attention_softmax.h"

namespace turbomind::TM_ISA {

TM_HD float ScaleOfRow(const Block& b, const View& view, int row) {
  return view.fns.round != nullptr ? view.scale * b.q_scale[row] : view.scale;
}

inline void UpdateRow(const Block& b, const View& view, int tile, int row) {
  const Seen seen = SeenByRow(b, view, tile, row);
  float* scores = b.scores + row * kTileTokens;
  const float scale = ScaleOfRow(b, view, row);
  if (seen.begin >= seen.end) {
    b.old[row] = 1.f;
    b.tile[row] = 0.f;
    __builtin_memset(scores, 0, kTileTokens * sizeof(float));
  } else if (view.fns.rounds_weights) {
    const auto factors = b.state[row].UpdateTile(scores, scale, seen.begin, seen.end);
    b.old[row] = factors.old;
    b.tile[row] = factors.tile * view.value_factor;
  } else {
    b.old[row] = b.state[row].Update(scores, scale, seen.begin, seen.end);
    ScaleWeights(scores, view.value_factor);
  }
}

#if defined(TM_ISA_avx512)

// Lane i is ReduceAdd(a[i % 4]): the same additions.
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

// PowerOfTwo of each lane.
TM_HD __m512 PowersOf2(__m512 n) {
  const __mmask16 in_range = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.f), _CMP_GE_OQ);
  const __m512i exponent =
      _mm512_add_epi32(_mm512_maskz_cvtps_epi32(in_range, n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(in_range, exponent, 23));
}

// SoftmaxState::UpdateTile of the rows [row, row + 4), which see all of the tile. A row with a NaN
// among its scores gets another m, and as there a sum of NaN, which its output becomes.
TM_HD void UpdateFourRows(const Block& b, const View& view, int row) {
  static_assert(sizeof(SoftmaxState) == 8);  // (m, l)
  float* scores = b.scores + row * kTileTokens;
  F32x16 s[4][4];
  F32x16 most[4];
  Unroll<4>([&](auto index) __attribute__((always_inline)) {
    constexpr int r = decltype(index)::value;
    const F32x16 scale = Set1(ScaleOfRow(b, view, row + r));
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int k = decltype(i)::value;
      s[r][k] = Mul(Load(scores + r * kTileTokens + 16 * k), scale);
    });
    most[r] = Max(Max(s[r][0], s[r][1]), Max(s[r][2], s[r][3]));
  });
  const __m512 top = _mm512_maskz_roundscale_ps(0xffff, MaxOfEach(most).v,
                                                _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  const __m512 state =
      _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(b.state + row)));
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
  F32x16 sum[4];
  Unroll<4>([&](auto index) __attribute__((always_inline)) {
    constexpr int r = decltype(index)::value;
    const F32x16 lowered = Set1(tops[r]);
    F32x16 w[4];
    Unroll<4>([&](auto i) __attribute__((always_inline)) {
      constexpr int k = decltype(i)::value;
      w[k] = Exp2(Sub(s[r][k], lowered));
      Store(scores + r * kTileTokens + 16 * k, w[k]);
    });
    sum[r] = Add(Add(w[0], w[1]), Add(w[2], w[3]));
  });
  const __m512 new_l = _mm512_add_ps(_mm512_mul_ps(l, old), _mm512_mul_ps(factor, SumOfEach(sum)));
  const __m512 new_m = _mm512_mask_mov_ps(top, lower, m);
  const __m512i pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm512_mask_storeu_ps(reinterpret_cast<float*>(b.state + row), 0x00ff,
                        _mm512_permutex2var_ps(new_m, pairs, new_l));
  _mm512_mask_storeu_ps(b.old + row, 0x000f, old);
  _mm512_mask_storeu_ps(b.tile + row, 0x000f,
                        _mm512_mul_ps(factor, _mm512_set1_ps(view.value_factor)));
}

inline int UpdateRowsInFours(const Block& b, const View& view) {
  int row = 0;
  for (; row + 4 <= b.rows; row += 4) {
    UpdateFourRows(b, view, row);
  }
  return row;
}

#else
inline int UpdateRowsInFours(const Block& /*block*/, const View& /*view*/) { return 0; }
#endif

// `all`: every row sees all of the tile.
inline void UpdateSoftmax(const Block& b, const View& view, int tile, bool all) {
  int row = all && view.fns.rounds_weights ? UpdateRowsInFours(b, view) : 0;
  for (; row < b.rows; ++row) {
    UpdateRow(b, view, tile, row);
  }
}

}  // namespace turbomind::TM_ISA
