#pragma once

// Computes y tile = tile · panelᵀ with AVX2 and FMA, in halves of 8 outputs. The sums and their
// order are those of linear_avx512.h, so the bits are the same.
//
// Instructions per block of 32 columns, row and 8 outputs: 4-bit codes take 16 vpmaddubsw of 32
// products, 14 additions, 2 vpmaddwd and 5 more. 8-bit codes take 16 vpmaddwd, 16 additions and 3
// more. Both take 16 broadcasts, which are loads.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/arrange_shorts.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

template <int R>
inline constexpr int kTilesAtOnce = 1;

inline constexpr int kHalfRows = 8;

TM_HD __m256i Broadcast32(const uint8_t* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return _mm256_set1_epi32(bits);
}

TM_HD __m256 BroadcastFloat(const uint8_t* p) {
  float value;
  __builtin_memcpy(&value, p, sizeof(value));
  return _mm256_set1_ps(value);
}

TM_HD __m256 LoadHalf8(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

TM_HD __m256i LoadCodes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Returns whether codes are multiplied as int16, because they have more than 4 bits.
TM_HD constexpr bool UsesShorts(MatrixFormat format) {
  return format == MatrixFormat::kQ8_0 || format == MatrixFormat::kQ5_K ||
         format == MatrixFormat::kQ6_K;
}

// Prefetches the bytes of run.next that belong to a step of pass `pass` over a tile. A tile that is
// read in two passes brings half of the next one in each: the first pass reads all lines of the
// tile, so without this, memory would rest during the second.
template <MatrixFormat F, int kTilePasses>
TM_HD void PrefetchNext(const TileRun& run, int64_t step, int pass) {
  constexpr int kStep = IsKQuant(F) ? TileSuperBlockBytes(F) / kKSteps : TileStepBytes(F);
  constexpr int kShare = kStep / kTilePasses;
  const uint8_t* share = run.next + pass * (run.tile_bytes / kTilePasses) + step * kShare;
#pragma GCC unroll 9
  for (int line = 0; line < kShare; line += 64) {
    _mm_prefetch(share + line, _MM_HINT_T0);
  }
}

// Rearranges a row of a step from QuantizeBlock's layout to DotColumns'.
TM_HD void ArrangeRow(MatrixFormat format, uint8_t* row) {
  if (UsesShorts(format)) {
    ArrangeShorts(row);
  }
}

// Number of passes over the columns of a block. A pass covers as many codes as fit in the registers
// together with a row's sums.
template <MatrixFormat F>
inline constexpr int kPasses = F == MatrixFormat::kQ8_0 ? 2 : 1;

// The codes of a pass for 8 outputs, unpacked for the multiplication with rows.
struct HalfCodes {
  __m256i v[8];
};

// Loads the codes of a pass. kQ8_0: pairs of int16, the columns (4g, 4g + 2) and (4g + 1, 4g + 3)
// of a group. Other formats: bytes, the columns of the low nibbles of a group, then those of the
// high ones.
template <MatrixFormat F, int kPass>
TM_HD HalfCodes LoadHalfCodes(const uint8_t* w) {
  HalfCodes codes;
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m256i group = LoadCodes(w + 64 * (4 * kPass + g));
    if constexpr (F == MatrixFormat::kQ8_0) {
      codes.v[2 * g] = _mm256_and_si256(group, _mm256_set1_epi16(0xff));
      codes.v[2 * g + 1] = _mm256_srli_epi16(group, 8);
    } else {
      const __m256i mask = _mm256_set1_epi8(0x0f);
      codes.v[2 * g] = _mm256_and_si256(group, mask);
      codes.v[2 * g + 1] = _mm256_and_si256(_mm256_srli_epi16(group, 4), mask);
    }
  }
  return codes;
}

// Adds codes * four activations of a row to sum. The asm keeps GCC 12 from turning a run of
// additions into a tree, whose leaves it would spill.
TM_HD void AddBytes(__m256i& sum, __m256i codes, const uint8_t* a) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, Broadcast32(a)));
  asm("" : "+x"(sum));
}
// Adds codes * two activations to sum.
TM_HD void AddShorts(__m256i& sum, __m256i codes, const uint8_t* a) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, Broadcast32(a)));
  asm("" : "+x"(sum));
}

// Returns 256 · high + low. Both operands are sums of pairs.
TM_HD __m256i JoinHalves(__m256i high, __m256i low) {
  return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)),
                          _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}

// Number of rows whose sums are interleaved. One row is a chain of additions, of which too few fit
// into the window of instructions that wait for their operands.
inline constexpr int kRowsAtOnce = 3;

// Computes Σ code * activation over 16 columns for N rows of int16, which are kQuantRowBytes apart.
template <int N>
TM_HD void DotShorts(const HalfCodes& codes, const uint8_t* a, __m256i (&sum)[N]) {
#pragma GCC unroll 3
  for (int n = 0; n < N; ++n) {
    sum[n] = _mm256_madd_epi16(codes.v[0], Broadcast32(a + n * kQuantRowBytes));
  }
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) {
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      AddShorts(sum[n], codes.v[i], a + n * kQuantRowBytes + 4 * i);
    }
  }
}

// Computes Σ code * activation over the columns of a pass, for N rows. With 4-bit codes, the sums
// of pairs stay within 8 * 2 * 15 * 127 < 2^15.
template <MatrixFormat F, int N>
TM_HD void DotColumns(const HalfCodes& codes, const uint8_t* a, __m256i (&sum)[N]) {
  if constexpr (F == MatrixFormat::kQ8_0) {
    DotShorts<N>(codes, a, sum);
  } else {
    __m256i high[N];
    __m256i low[N];
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      const uint8_t* x = a + n * kQuantRowBytes;
      high[n] = _mm256_maddubs_epi16(codes.v[0], Broadcast32(x));
      low[n] = _mm256_maddubs_epi16(codes.v[0], Broadcast32(x + kQuantBlock));
    }
#pragma GCC unroll 8
    for (int i = 1; i < 8; ++i) {
#pragma GCC unroll 3
      for (int n = 0; n < N; ++n) {
        const uint8_t* x = a + n * kQuantRowBytes + 16 * (i % 2) + 4 * (i / 2);
        AddBytes(high[n], codes.v[i], x);
        AddBytes(low[n], codes.v[i], x + kQuantBlock);
      }
    }
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      sum[n] = JoinHalves(high[n], low[n]);
    }
  }
}

// Calls fn.template operator()<N>(r) for rows [r, r + N), N at most kAtOnce, until all R rows have
// been processed.
template <int R, int kAtOnce = kRowsAtOnce, class Fn>
TM_HD void ForRows(const Fn& fn) {
  constexpr int kWhole = R / kAtOnce * kAtOnce;
#pragma GCC unroll 1
  for (int r = 0; r < kWhole; r += kAtOnce) {
    fn.template operator()<kAtOnce>(r);
  }
  if constexpr (kWhole < R) {
    fn.template operator()<R - kWhole>(kWhole);
  }
}

// Computes DotColumns of one row for both halves and all columns.
template <MatrixFormat F>
TM_HD void DotBothHalves(const uint8_t* w, const uint8_t* a, __m256i (&sum)[2]) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i mask = _mm256_set1_epi16(F == MatrixFormat::kQ8_0 ? 0x00ff : 0x0f0f);
  __m256i high[2] = {zero, zero};  // high bytes of the activations; kQ8_0: whole activations
  __m256i low[2] = {zero, zero};
#pragma GCC unroll 8
  for (int g = 0; g < (F == MatrixFormat::kQ8_0 ? 8 : 4); ++g) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i group = LoadCodes(w + 64 * g + 32 * half);
      const __m256i first = _mm256_and_si256(group, mask);
      if constexpr (F == MatrixFormat::kQ8_0) {
        AddShorts(high[half], first, a + 8 * g);
        AddShorts(high[half], _mm256_srli_epi16(group, 8), a + 8 * g + 4);
      } else {
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(group, 4), mask);
        const uint8_t* x = a + 4 * g;
        AddBytes(high[half], first, x);
        AddBytes(low[half], first, x + kQuantBlock);
        AddBytes(high[half], second, x + 16);
        AddBytes(low[half], second, x + kQuantBlock + 16);
      }
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    sum[half] = F == MatrixFormat::kQ8_0 ? high[half] : JoinHalves(high[half], low[half]);
  }
}

// Sets sum[r] to DotColumns in the first pass and adds to it in later ones, for all rows.
template <MatrixFormat F, int R, int kPass>
TM_HD void DotRows(const uint8_t* w, const uint8_t* a, __m256i (&sum)[R]) {
  const HalfCodes codes = LoadHalfCodes<F, kPass>(w);
  ForRows<R>([&]<int N>(int r) __attribute__((always_inline)) {
    __m256i dot[N];
    DotColumns<F, N>(codes, a + r * kQuantRowBytes + kPass * kQuantBlock, dot);
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      sum[r + n] = kPass == 0 ? dot[n] : _mm256_add_epi32(sum[r + n], dot[n]);
    }
  });
}

// Adds the half step at `w` for all rows: 8 outputs, whose scales are at `meta`. The scaling is a
// separate loop. Otherwise a row's instructions would be too long a chain for enough rows to be in
// flight at once.
template <MatrixFormat F, int R>
TM_HD void AddQuantStep(const uint8_t* w, const uint8_t* meta, const uint8_t* a, __m256 (&acc)[R]) {
  __m256i sum[R];
  DotRows<F, R, 0>(w, a, sum);
  if constexpr (kPasses<F> == 2) {
    DotRows<F, R, 1>(w, a, sum);
  }
  const uint8_t* scales = a + R * kQuantRowBytes;  // float d[R]
  const uint8_t* offsets = scales + R * 4;
  const __m256 d = LoadHalf8(meta);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    if constexpr (F != MatrixFormat::kQ4_1) {
      sum[r] = _mm256_add_epi32(sum[r], Broadcast32(offsets + 4 * r));
    }
    acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]),
                             _mm256_mul_ps(d, BroadcastFloat(scales + 4 * r)), acc[r]);
    if constexpr (F == MatrixFormat::kQ4_1) {
      acc[r] = _mm256_fmadd_ps(LoadHalf8(meta + 32), BroadcastFloat(offsets + 4 * r), acc[r]);
    }
  }
}

// Convert BF16 pairs to floats: the odd and the even element. The odd one is added first, as
// vdpbf16ps does.
TM_HD __m256 OddBF16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
TM_HD __m256 EvenBF16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

// Adds one step of N rows of a panel, starting at `a`, for the 8 outputs at `w`.
template <MatrixFormat F, int N>
TM_HD void AddFloatStep(const uint8_t* w, const uint8_t* a, __m256 (&acc)[N]) {
  if constexpr (F == MatrixFormat::kF32) {
    const __m256 column = _mm256_loadu_ps(reinterpret_cast<const float*>(w));
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      acc[n] = _mm256_fmadd_ps(column, BroadcastFloat(a + 4 * n), acc[n]);
    }
  } else {
    const __m256i columns = LoadCodes(w);
    const __m256 odd = OddBF16(columns);
    const __m256 even = EvenBF16(columns);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const __m256i x = Broadcast32(a + 4 * n);
      acc[n] = _mm256_fmadd_ps(even, EvenBF16(x), _mm256_fmadd_ps(odd, OddBF16(x), acc[n]));
    }
  }
}

TM_HD void StoreHalf(const TileRun& run, int row, int half, __m256 acc) {
  const int64_t first = half * kHalfRows;
  const int64_t outputs = run.num_outputs - first;
  if (outputs <= 0) {
    return;
  }
  float* y = run.y + row * run.y_stride + first;
  if (outputs >= kHalfRows) {
    if (run.bias != nullptr) {
      acc = _mm256_add_ps(acc, _mm256_loadu_ps(run.bias + first));
    }
    if (run.accumulate) {
      acc = _mm256_add_ps(acc, _mm256_loadu_ps(y));
    }
    _mm256_storeu_ps(y, acc);
    return;
  }
  float lanes[kHalfRows];
  _mm256_storeu_ps(lanes, acc);
  for (int64_t i = 0; i < outputs; ++i) {
    const float out = run.bias != nullptr ? lanes[i] + run.bias[first + i] : lanes[i];
    y[i] = run.accumulate ? out + y[i] : out;
  }
}

// Multiplies all R rows. The codes of a half step are unpacked once; a row's sums stay in memory
// meanwhile.
template <MatrixFormat F, int R>
void MultiplyQuantHalf(const TileRun& run, int half) {
  __m256 acc[R];
  for (int r = 0; r < R; ++r) {
    acc[r] = _mm256_setzero_ps();
  }
#pragma GCC unroll 1
  for (int64_t s = 0; s < run.steps; ++s) {
    const uint8_t* step = run.tile + s * TileStepBytes(F);
    PrefetchNext<F, 2>(run, s, half);
    AddQuantStep<F, R>(step + TileMetaBytes(F) + 32 * half, step + 16 * half,
                       run.panel + s * PanelStepBytes(F, R), acc);
  }
  for (int r = 0; r < R; ++r) {
    StoreHalf(run, r, half, acc[r]);
  }
}

// Multiplies one row with both halves together. Its broadcasts serve both, and its sums stay in
// registers.
template <MatrixFormat F>
void MultiplyQuantRow(const TileRun& run) {
  __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int64_t s = 0; s < run.steps; ++s) {
    const uint8_t* meta = run.tile + s * TileStepBytes(F);
    const uint8_t* w = meta + TileMetaBytes(F);
    const uint8_t* a = run.panel + s * PanelStepBytes(F, 1);
    PrefetchNext<F, 1>(run, s, 0);
    __m256i sum[2];
    DotBothHalves<F>(w, a, sum);
    const __m256 scale = BroadcastFloat(a + kQuantRowBytes);
    const uint8_t* offset = a + kQuantRowBytes + 4;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if constexpr (F != MatrixFormat::kQ4_1) {
        sum[half] = _mm256_add_epi32(sum[half], Broadcast32(offset));
      }
      const __m256 d = LoadHalf8(meta + 16 * half);
      acc[half] =
          _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[half]), _mm256_mul_ps(d, scale), acc[half]);
      if constexpr (F == MatrixFormat::kQ4_1) {
        acc[half] =
            _mm256_fmadd_ps(LoadHalf8(meta + 32 + 16 * half), BroadcastFloat(offset), acc[half]);
      }
    }
  }
  StoreHalf(run, 0, 0, acc[0]);
  StoreHalf(run, 0, 1, acc[1]);
}

// Multiplies the rows [row, row + N), whose sums stay in registers.
template <MatrixFormat F, int R, int N>
void MultiplyFloatHalf(const TileRun& run, int row, int half) {
  __m256 acc[N];
  for (int n = 0; n < N; ++n) {
    acc[n] = _mm256_setzero_ps();
  }
  for (int64_t s = 0; s < run.steps; ++s) {
    if (row == 0) {
      PrefetchNext<F, 2>(run, s, half);
    }
    AddFloatStep<F, N>(run.tile + s * TileStepBytes(F) + 32 * half,
                       run.panel + s * PanelStepBytes(F, R) + 4 * row, acc);
  }
  for (int n = 0; n < N; ++n) {
    StoreHalf(run, row + n, half, acc[n]);
  }
}

template <MatrixFormat F, int R, int T>
void MultiplyTiles(const TileRun& run) {
  static_assert(T == 1);
  constexpr int kRows = 4;
  if constexpr (IsQuantized(F) && R == 1) {
    MultiplyQuantRow<F>(run);
  } else {
    for (int half = 0; half < 2; ++half) {
      if constexpr (IsQuantized(F)) {
        MultiplyQuantHalf<F, R>(run, half);
      } else {
        constexpr int kWhole = R / kRows * kRows;
        for (int row = 0; row < kWhole; row += kRows) {
          MultiplyFloatHalf<F, R, kRows>(run, row, half);
        }
        if constexpr (kWhole < R) {
          MultiplyFloatHalf<F, R, R - kWhole>(run, kWhole, half);
        }
      }
    }
  }
}

}  // namespace turbomind::TM_ISA
