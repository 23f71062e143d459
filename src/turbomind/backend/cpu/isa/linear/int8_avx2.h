#pragma once

// Computes y tile = tile · panelᵀ for activations of 8 bits with AVX2 and FMA, in halves of 8
// outputs. The sums and their order are those of int8_scalar.h, so the bits are the same.
//
// Instructions per block of 32 columns, row and 8 outputs, with 8 broadcasts: codes of 4 bits take
// 8 vpmaddubsw of 32 products, 7 additions and 1 vpmaddwd; codes of 5 bits 8, 7 and 2; codes of 6
// bits 8, 6 and 4. Two products of codes of 8 bits do not fit in int16, so kQ8_0 is multiplied by
// the kernels of linear_avx2.h, with the codes of the activations widened to int16.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/k_quants_avx2.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx2.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

template <MatrixFormat F, int R>
inline constexpr int kInt8TilesAtOnce = 1;

// Bytes of a row in a step of a panel: int8, or int16 for codes of 8 bits.
TM_HD constexpr int Int8RowBytes(MatrixFormat format) {
  return format == MatrixFormat::kQ8_0 ? 2 * kQuantBlock : kQuantBlock;
}

// Rearranges the int8 codes of a row to the order of the kernels.
TM_HD void ArrangeInt8Row(MatrixFormat format, uint8_t* row) {
  if (format != MatrixFormat::kQ8_0) {
    return;
  }
  int16_t pairs[kQuantBlock];
  for (int i = 0; i < kQuantBlock; ++i) {
    pairs[i] = static_cast<int8_t>(row[ShortColumn(i)]);
  }
  __builtin_memcpy(row, pairs, sizeof(pairs));
}

// The codes of 32 columns of 8 outputs as bytes.
struct ByteCodes {
  WideCodes half[2];  // of the columns
};

TM_HD ByteCodes LoadNibbles(const uint8_t* w) {
  const __m256i mask = _mm256_set1_epi8(0x0f);
  ByteCodes codes;
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m256i group = LoadCodes(w + 64 * g);
    codes.half[0].group[g] = _mm256_and_si256(group, mask);
    codes.half[1].group[g] = _mm256_and_si256(_mm256_srli_epi16(group, 4), mask);
  }
  return codes;
}

template <MatrixFormat F>
TM_HD ByteCodes LoadByteCodes(const uint8_t* w) {
  if constexpr (F == MatrixFormat::kQ5_K) {
    return {{LoadFiveBits<0>(w), LoadFiveBits<1>(w)}};
  } else if constexpr (F == MatrixFormat::kQ6_K) {
    return {{LoadSixBits<0>(w), LoadSixBits<1>(w)}};
  } else {
    return LoadNibbles(w);
  }
}

// Adds codes * activations of the groups [kFirst, kFirst + kCount) of 16 columns to the sums of
// pairs of N rows, which are kQuantBlock bytes apart.
template <int kFirst, int kCount, int N>
TM_HD void AddGroups(const WideCodes& codes, const uint8_t* a, __m256i (&sum)[N]) {
#pragma GCC unroll 4
  for (int g = kFirst; g < kFirst + kCount; ++g) {
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      AddBytes(sum[n], codes.group[g], a + n * kQuantBlock + 4 * g);
    }
  }
}
// Sets the sums to those of the groups.
template <int kFirst, int kCount, int N>
TM_HD void SumGroups(const WideCodes& codes, const uint8_t* a, __m256i (&sum)[N]) {
#pragma GCC unroll 3
  for (int n = 0; n < N; ++n) {
    sum[n] =
        _mm256_maddubs_epi16(codes.group[kFirst], Broadcast32(a + n * kQuantBlock + 4 * kFirst));
  }
  AddGroups<kFirst + 1, kCount - 1, N>(codes, a, sum);
}

TM_HD __m256i JoinPairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
TM_HD __m256i JoinPairs(__m256i x, __m256i y) {
  return _mm256_add_epi32(JoinPairs(x), JoinPairs(y));
}

// Σ code * activation of one row, over 32 columns, or for kQ6_K over 16 columns each.
struct Int8Sums {
  __m256i first;
  __m256i second;
};

// Computes the sums of N rows. Those of pairs stay within 2^15: 8 * 2 * 15 * 127 for 4 bits,
// 4 * 2 * 31 * 127 for 5 bits and 2 * 2 * 63 * 127 for 6 bits.
template <MatrixFormat F, int N>
TM_HD void DotInt8(const ByteCodes& codes, const uint8_t* a, Int8Sums (&sums)[N]) {
  const WideCodes& low = codes.half[0];
  const WideCodes& high = codes.half[1];
  const uint8_t* b = a + kQuantBlock / 2;
  constexpr int kGroups = F == MatrixFormat::kQ6_K ? 2 : 4;
  __m256i x[N];
  __m256i y[N];
  SumGroups<0, kGroups, N>(low, a, x);
  if constexpr (F == MatrixFormat::kQ6_K) {
    SumGroups<2, 2, N>(low, a, y);
  } else if constexpr (F == MatrixFormat::kQ5_K) {
    SumGroups<0, 4, N>(high, b, y);
  } else {
    AddGroups<0, 4, N>(high, b, x);
  }
#pragma GCC unroll 3
  for (int n = 0; n < N; ++n) {
    constexpr bool kTwoSums = F == MatrixFormat::kQ5_K || F == MatrixFormat::kQ6_K;
    sums[n].first = kTwoSums ? JoinPairs(x[n], y[n]) : JoinPairs(x[n]);
    sums[n].second = sums[n].first;
  }
  if constexpr (F == MatrixFormat::kQ6_K) {
    SumGroups<0, 2, N>(high, b, x);
    SumGroups<2, 2, N>(high, b, y);
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      sums[n].second = JoinPairs(x[n], y[n]);
    }
  }
}

// The scales of 32 columns of 8 outputs.
template <MatrixFormat F>
TM_HD KScales LoadInt8Scales(const uint8_t* tile, int64_t step, int half) {
  if constexpr (IsKQuant(F)) {
    return LoadKScales<F>(tile + step / kKSteps * TileSuperBlockBytes(F),
                          static_cast<int>(step % kKSteps), half);
  } else {
    const uint8_t* meta = tile + step * TileStepBytes(F) + 16 * half;
    const __m256 d = LoadHalf8(meta);
    return {d, F == MatrixFormat::kQ4_1 ? LoadHalf8(meta + 32) : d};
  }
}

template <MatrixFormat F>
TM_HD const uint8_t* CodesOfStep(const uint8_t* tile, int64_t step) {
  if constexpr (IsKQuant(F)) {
    return tile + step / kKSteps * TileSuperBlockBytes(F) + KCodesAt(F) +
           step % kKSteps * TileStepBytes(F);
  } else {
    return tile + step * TileStepBytes(F) + TileMetaBytes(F);
  }
}

// Adds the scaled sums of one of R rows. `scales` is its place in float d[R] of the panel.
template <MatrixFormat F, int R>
TM_HD __m256 AddInt8Scaled(Int8Sums sums, const KScales& own, const uint8_t* scales, __m256 acc) {
  const uint8_t* offsets = scales + 4 * R;
  const __m256 d = BroadcastFloat(scales);
  if constexpr (F == MatrixFormat::kQ6_K) {
    const __m256i first = _mm256_add_epi32(sums.first, Broadcast32(offsets));
    const __m256i second = _mm256_add_epi32(sums.second, Broadcast32(offsets + 4 * R));
    const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(first), own.scale);
    return _mm256_fmadd_ps(_mm256_fmadd_ps(_mm256_cvtepi32_ps(second), own.second, scaled), d, acc);
  } else {
    const __m256i sum =
        HasMinimum(F) ? sums.first : _mm256_add_epi32(sums.first, Broadcast32(offsets));
    acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(own.scale, d), acc);
    if constexpr (F == MatrixFormat::kQ4_1) {
      acc = _mm256_fmadd_ps(own.second, BroadcastFloat(offsets), acc);
    } else if constexpr (HasMinimum(F)) {
      acc = _mm256_fnmadd_ps(own.second, BroadcastFloat(offsets), acc);
    }
    return acc;
  }
}

// Rows whose sums are interleaved. kQ6_K has enough sums in one row, and two rows alone were
// slower.
template <MatrixFormat F, int R>
inline constexpr int kInt8RowsAtOnce = F == MatrixFormat::kQ6_K || R == 2 ? 1 : kRowsAtOnce;

// Multiplies all R rows with 8 outputs. As in linear_avx2.h, the scaling is a loop of its own.
template <MatrixFormat F, int R>
void MultiplyInt8Half(const TileRun& run, int half) {
  __m256 acc[R];
  for (int r = 0; r < R; ++r) {
    acc[r] = _mm256_setzero_ps();
  }
  const uint8_t* a = run.panel;
#pragma GCC unroll 1
  for (int64_t s = 0; s < run.steps; ++s) {
    PrefetchNext<F, 2>(run, s, half);
    const ByteCodes codes = LoadByteCodes<F>(CodesOfStep<F>(run.tile, s) + 32 * half);
    Int8Sums sums[R];
    ForRows<R, kInt8RowsAtOnce<F, R>>([&]<int N>(int r) __attribute__((always_inline)) {
      Int8Sums dot[N];
      DotInt8<F, N>(codes, a + r * kQuantBlock, dot);
#pragma GCC unroll 3
      for (int n = 0; n < N; ++n) {
        sums[r + n] = dot[n];
      }
    });
    const KScales own = LoadInt8Scales<F>(run.tile, s, half);
    const uint8_t* scales = a + R * kQuantBlock;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      acc[r] = AddInt8Scaled<F, R>(sums[r], own, scales + 4 * r, acc[r]);
    }
    a += Int8PanelStepBytes(F, R, kQuantBlock);
  }
  for (int r = 0; r < R; ++r) {
    StoreHalf(run, r, half, acc[r]);
  }
}

// Adds a step of both halves for one row. `w` are the codes.
template <MatrixFormat F>
TM_HD void AddInt8RowStep(const uint8_t* w, const KScales (&own)[2], const uint8_t* a,
                          __m256 (&acc)[2]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    Int8Sums sums[1];
    DotInt8<F, 1>(LoadByteCodes<F>(w + 32 * half), a, sums);
    acc[half] = AddInt8Scaled<F, 1>(sums[0], own[half], a + kQuantBlock, acc[half]);
  }
}

// Multiplies one row with both halves together, because its broadcasts serve both.
template <MatrixFormat F>
void MultiplyInt8Row(const TileRun& run) {
  constexpr int kSteps = IsKQuant(F) ? kKSteps : 1;  // with the scales of a block
  constexpr int kBlockBytes = IsKQuant(F) ? TileSuperBlockBytes(F) : TileStepBytes(F);
  __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  const uint8_t* a = run.panel;
  const uint8_t* block = run.tile;
  for (int64_t s = 0; s < run.steps; s += kSteps, block += kBlockBytes) {
    const uint8_t* w = CodesOfStep<F>(block, 0);
#pragma GCC unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const KScales own[2] = {LoadInt8Scales<F>(block, step, 0), LoadInt8Scales<F>(block, step, 1)};
      PrefetchNext<F, 1>(run, s + step, 0);
      AddInt8RowStep<F>(w, own, a, acc);
      w += TileStepBytes(F);
      a += Int8PanelStepBytes(F, 1, kQuantBlock);
    }
  }
  StoreHalf(run, 0, 0, acc[0]);
  StoreHalf(run, 0, 1, acc[1]);
}

template <MatrixFormat F, int R, int T>
TM_HD void MultiplyInt8Tiles(const TileRun& run) {
  static_assert(T == 1);
  if constexpr (F == MatrixFormat::kQ8_0) {
    static_assert(Int8PanelStepBytes(F, R, Int8RowBytes(F)) == PanelStepBytes(F, R));
    MultiplyTiles<F, R, T>(run);
  } else if constexpr (R == 1) {
    MultiplyInt8Row<F>(run);
  } else {
    MultiplyInt8Half<F, R>(run, 0);
    MultiplyInt8Half<F, R>(run, 1);
  }
}

}  // namespace turbomind::TM_ISA
