#pragma once

// Computes y tile = tile · panelᵀ for K-quants with AVX2 and FMA, in halves of 8 outputs. The sums
// and their order are those of k_quants_scalar.h, so the bits are the same. Codes of kQ4_K are
// multiplied as bytes and those of kQ5_K and kQ6_K as int16 (linear_avx2.h).
//
// Unpacking the scales and minima of 32 columns of 8 outputs takes 12 instructions, once for all
// rows of a panel. 128 codes of 5 or 6 bits take 26 or 19 instructions.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx2.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// The scales of 16 or 32 columns of 8 outputs: exact products of FP16 and 6 or 8 bits.
struct KScales {
  __m256 scale;
  __m256 second;  // the minimum; kQ6_K: the scale of the second 16 columns
};

TM_HD __m128i Load8(const uint8_t* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}

template <MatrixFormat F>
TM_HD KScales LoadKScales(const uint8_t* block, int step, int half) {
  const __m256 d = LoadHalf8(block + 16 * half);
  if constexpr (F == MatrixFormat::kQ6_K) {
    const uint8_t* scales = block + kQ6ScalesAt + 2 * step * kTileRows + 8 * half;
    return {_mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(Load8(scales)))),
            _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(Load8(scales + kTileRows))))};
  } else {
    const __m256i packed =
        _mm256_cvtepu8_epi32(Load8(block + kKScalesAt + step * kTileRows + 8 * half));
    const __m256i nibbles = _mm256_cvtepu8_epi32(Load8(block + kKMinimaAt + step * kTileRows / 2));
    const __m256i low = half == 0 ? _mm256_and_si256(nibbles, _mm256_set1_epi32(15))
                                  : _mm256_srli_epi32(nibbles, 4);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi32(packed, 2), _mm256_set1_epi32(0x30));
    const __m256i scale = _mm256_and_si256(packed, _mm256_set1_epi32(63));
    return {_mm256_mul_ps(d, _mm256_cvtepi32_ps(scale)),
            _mm256_mul_ps(LoadHalf8(block + kKMinAt + 16 * half),
                          _mm256_cvtepi32_ps(_mm256_or_si256(low, high)))};
  }
}

// Shifts left, or right if `kBits` is negative.
template <int kBits>
TM_HD __m256i Shift(__m256i x) {
  return kBits >= 0 ? _mm256_slli_epi16(x, kBits) : _mm256_srli_epi16(x, -kBits);
}

// The codes of 16 columns of 8 outputs as bytes: four groups of 4 columns.
struct WideCodes {
  __m256i group[4];
};

template <int kHalf>
TM_HD WideCodes LoadFiveBits(const uint8_t* w) {
  const __m256i fifths = LoadCodes(w + kFifthBitsAt);
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i sixteen = _mm256_set1_epi8(0x10);
  const __m256i high[4] = {Shift<4 - 4 * kHalf>(fifths), Shift<3 - 4 * kHalf>(fifths),
                           Shift<2 - 4 * kHalf>(fifths), Shift<1 - 4 * kHalf>(fifths)};
  WideCodes codes;
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m256i low = Shift<-4 * kHalf>(LoadCodes(w + 64 * g));
    codes.group[g] =
        _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(high[g], sixteen));
  }
  return codes;
}

template <int kHalf>
TM_HD WideCodes LoadSixBits(const uint8_t* w) {
  w += 192 * kHalf;
  const __m256i six = _mm256_set1_epi8(0x3f);
  const __m256i parts[3] = {LoadCodes(w), LoadCodes(w + 64), LoadCodes(w + 128)};
  const __m256i last[3] = {
      _mm256_and_si256(Shift<-6>(parts[0]), _mm256_set1_epi8(0x03)),
      _mm256_and_si256(Shift<-4>(parts[1]), _mm256_set1_epi8(0x0c)),
      _mm256_and_si256(Shift<-2>(parts[2]), _mm256_set1_epi8(0x30)),
  };
  return {{_mm256_and_si256(parts[0], six), _mm256_and_si256(parts[1], six),
           _mm256_and_si256(parts[2], six),
           _mm256_or_si256(_mm256_or_si256(last[0], last[1]), last[2])}};
}

// Loads the codes of one half of the columns as pairs of int16, in the order of LoadHalfCodes.
template <MatrixFormat F, int kHalf>
TM_HD HalfCodes LoadWideCodes(const uint8_t* w) {
  WideCodes bytes;
  if constexpr (F == MatrixFormat::kQ5_K) {
    bytes = LoadFiveBits<kHalf>(w);
  } else {
    bytes = LoadSixBits<kHalf>(w);
  }
  HalfCodes codes;
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    codes.v[2 * g] = _mm256_and_si256(bytes.group[g], _mm256_set1_epi16(0xff));
    codes.v[2 * g + 1] = _mm256_srli_epi16(bytes.group[g], 8);
  }
  return codes;
}

// Sets sum[r] to Σ code * activation over 16 columns, for all rows.
template <MatrixFormat F, int R, int kPass>
TM_HD void DotWideRows(const uint8_t* w, const uint8_t* a, __m256i (&sum)[R]) {
  const HalfCodes codes = LoadWideCodes<F, kPass>(w);
  ForRows<R>([&]<int N>(int r) __attribute__((always_inline)) {
    __m256i dot[N];
    DotShorts<N>(codes, a + r * kQuantRowBytes + kPass * kQuantBlock, dot);
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      sum[r + n] = dot[n];
    }
  });
}

// Adds scaled sums of row r. kQ6_K: `sum` and `other` are those of 16 columns; other formats: `sum`
// is that of 32 columns. `scales` is the row's place in float d[R] of the panel, R floats before
// its place in what follows.
template <MatrixFormat F, int R>
TM_HD __m256 AddScaled(__m256i sum, __m256i other, const KScales& own, const uint8_t* scales,
                       __m256 acc) {
  const uint8_t* offsets = scales + 4 * R;
  const __m256 d = BroadcastFloat(scales);
  if constexpr (F == MatrixFormat::kQ6_K) {
    sum = _mm256_add_epi32(sum, Broadcast32(offsets));
    other = _mm256_add_epi32(other, Broadcast32(offsets + 4 * R));
    const __m256 first = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), own.scale);
    return _mm256_fmadd_ps(_mm256_fmadd_ps(_mm256_cvtepi32_ps(other), own.second, first), d, acc);
  } else {
    acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(own.scale, d), acc);
    return _mm256_fnmadd_ps(own.second, BroadcastFloat(offsets), acc);
  }
}

// Adds 32 columns of 8 outputs for all rows. `w` are their codes.
template <MatrixFormat F, int R>
TM_HD void AddKStep(const uint8_t* w, const KScales& own, const uint8_t* a, __m256 (&acc)[R]) {
  __m256i sum[R];
  __m256i other[R];
  if constexpr (F == MatrixFormat::kQ4_K) {
    DotRows<F, R, 0>(w, a, sum);
  } else {
    DotWideRows<F, R, 0>(w, a, sum);
    DotWideRows<F, R, 1>(w, a, other);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    if constexpr (F == MatrixFormat::kQ5_K) {
      sum[r] = _mm256_add_epi32(sum[r], other[r]);
    }
    const __m256i second = F == MatrixFormat::kQ6_K ? other[r] : sum[r];
    acc[r] = AddScaled<F, R>(sum[r], second, own, a + R * kQuantRowBytes + 4 * r, acc[r]);
  }
}

// Multiplies all R rows with 8 outputs.
template <MatrixFormat F, int R>
void MultiplyKHalf(const TileRun& run, int half) {
  __m256 acc[R];
  for (int r = 0; r < R; ++r) {
    acc[r] = _mm256_setzero_ps();
  }
  const uint8_t* a = run.panel;
  const uint8_t* block = run.tile;
  for (int64_t s = 0; s < run.steps; s += kKSteps, block += TileSuperBlockBytes(F)) {
    const uint8_t* w = block + KCodesAt(F) + 32 * half;
#pragma GCC unroll 1
    for (int step = 0; step < kKSteps; ++step) {
      PrefetchNext<F, 2>(run, s + step, half);
      AddKStep<F, R>(w, LoadKScales<F>(block, step, half), a, acc);
      w += TileStepBytes(F);
      a += PanelStepBytes(F, R);
    }
  }
  for (int r = 0; r < R; ++r) {
    StoreHalf(run, r, half, acc[r]);
  }
}

// Multiplies one row with both halves together.
template <MatrixFormat F>
void MultiplyKRow(const TileRun& run) {
  __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  const uint8_t* a = run.panel;
  const uint8_t* block = run.tile;
  for (int64_t s = 0; s < run.steps; s += kKSteps, block += TileSuperBlockBytes(F)) {
    const uint8_t* w = block + KCodesAt(F);
#pragma GCC unroll 1
    for (int step = 0; step < kKSteps; ++step) {
      PrefetchNext<F, 1>(run, s + step, 0);
      // sum[half][part]: one part of 32 columns, or two of 16 (Q6_K)
      __m256i sum[2][2] = {};
      if constexpr (F == MatrixFormat::kQ4_K) {
        __m256i both[2];
        DotBothHalves<F>(w, a, both);
        sum[0][0] = both[0];
        sum[1][0] = both[1];
      } else {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          __m256i both[2][1];
          DotShorts<1>(LoadWideCodes<F, 0>(w + 32 * half), a, both[0]);
          DotShorts<1>(LoadWideCodes<F, 1>(w + 32 * half), a + kQuantBlock, both[1]);
          sum[half][0] = both[0][0];
          sum[half][1] = both[1][0];
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        if constexpr (F == MatrixFormat::kQ5_K) {
          sum[half][0] = _mm256_add_epi32(sum[half][0], sum[half][1]);
        }
        acc[half] = AddScaled<F, 1>(sum[half][0], sum[half][1], LoadKScales<F>(block, step, half),
                                    a + kQuantRowBytes, acc[half]);
      }
      w += TileStepBytes(F);
      a += PanelStepBytes(F, 1);
    }
  }
  StoreHalf(run, 0, 0, acc[0]);
  StoreHalf(run, 0, 1, acc[1]);
}

template <MatrixFormat F, int R, int T>
void MultiplyKTiles(const TileRun& run) {
  static_assert(T == 1);
  if constexpr (R == 1) {
    MultiplyKRow<F>(run);
  } else {
    MultiplyKHalf<F, R>(run, 0);
    MultiplyKHalf<F, R>(run, 1);
  }
}

}  // namespace turbomind::TM_ISA
