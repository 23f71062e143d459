#pragma once

// Computes y tile = tile · panelᵀ for K-quants with AVX-512 VNNI. Lanes are the 16 outputs of a
// tile. The sums and their order are those of k_quants_scalar.h, so the bits are the same.
//
// Codes of kQ4_K are multiplied as bytes, like those of kQ4_1. Codes of kQ5_K and kQ6_K take more
// instructions to unpack, so they are unpacked once, as int16, for both halves of the activations.
// Both ways take 16 products of 64 or 32 codes per row and block of 32 columns. Unpacking the
// scales and minima of a block takes 10 instructions, once for all rows of a panel.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/simd/dot_pairs_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// The scales of 16 or 32 columns of 16 outputs: exact products of FP16 and 6 or 8 bits.
struct KScales {
  __m512 scale;
  __m512 second;  // the minimum; kQ6_K: the scale of the second 16 columns
};

TM_HD __m128i Load16Bytes(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// Returns d times the int8 numbers at p.
TM_HD __m512 TimesBytes(__m512 d, const uint8_t* p) {
  const __m512i numbers = _mm512_maskz_cvtepi8_epi32(0xffff, Load16Bytes(p));
  return _mm512_mul_ps(d, _mm512_maskz_cvtepi32_ps(0xffff, numbers));
}

// Returns a where the bits of the mask are set, else b.
TM_HD __m512i SelectBits(__m512i mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}

// Loads 16 minima, whose lower 4 bits are at p. The upper 2 bits are those above the scales in
// `packed`.
TM_HD __m512i LoadMinima(const uint8_t* p, __m512i packed) {
  int64_t nibbles;
  __builtin_memcpy(&nibbles, p, sizeof(nibbles));
  // The first bit of each output's nibble. Qword i holds the lanes 2i and 2i + 1.
  const __m512i from = _mm512_setr_epi64(0x0800000000, 0x1800000010, 0x2800000020, 0x3800000030,
                                         0x0c00000004, 0x1c00000014, 0x2c00000024, 0x3c00000034);
  const __m512i low =
      _mm512_maskz_multishift_epi64_epi8(0x1111111111111111, from, _mm512_set1_epi64(nibbles));
  const __m512i both = SelectBits(_mm512_set1_epi32(0x30), _mm512_srli_epi32(packed, 2), low);
  return _mm512_and_si512(both, _mm512_set1_epi32(63));
}

// Loads the scales of step `step` of the super-block at `block`.
template <MatrixFormat F>
TM_HD KScales LoadKScales(const uint8_t* block, int step) {
  const __m512 d = LoadHalf16(block);
  if constexpr (F == MatrixFormat::kQ6_K) {
    const uint8_t* scales = block + kQ6ScalesAt + 2 * step * kTileRows;
    return {TimesBytes(d, scales), TimesBytes(d, scales + kTileRows)};
  } else {
    const __m512i packed =
        _mm512_maskz_cvtepu8_epi32(0xffff, Load16Bytes(block + kKScalesAt + step * kTileRows));
    const __m512i scale = _mm512_and_si512(packed, _mm512_set1_epi32(63));
    const __m512i minimum = LoadMinima(block + kKMinimaAt + step * kTileRows / 2, packed);
    return {_mm512_mul_ps(d, _mm512_maskz_cvtepi32_ps(0xffff, scale)),
            _mm512_mul_ps(LoadHalf16(block + kKMinAt), _mm512_maskz_cvtepi32_ps(0xffff, minimum))};
  }
}

// Shifts words left, or right if `kBits` is negative.
template <int kBits>
TM_HD __m512i ShiftWords(__m512i x) {
  if constexpr (kBits >= 0) {
    return _mm512_slli_epi16(x, kBits);
  } else {
    return _mm512_srli_epi16(x, -kBits);
  }
}

// The bits of a code of more than 4 bits.
template <MatrixFormat F>
inline constexpr int kWideMask = F == MatrixFormat::kQ5_K ? 0x1f : 0x3f;

// Loads the codes of 4 columns, group `kGroup` of a half of a step's columns, as bytes. The bits
// above the codes are undefined.
template <MatrixFormat F, int kHalf, int kGroup>
TM_HD __m512i LoadWideCodes(const uint8_t* w) {
  if constexpr (F == MatrixFormat::kQ5_K) {
    const __m512i nibbles = ShiftWords<-4 * kHalf>(_mm512_loadu_si512(w + 64 * kGroup));
    const __m512i fifths = _mm512_loadu_si512(w + kFifthBitsAt);
    return SelectBits(_mm512_set1_epi8(0x0f), nibbles, ShiftWords<4 - 4 * kHalf - kGroup>(fifths));
  } else if constexpr (kGroup < 3) {
    return _mm512_loadu_si512(w + 192 * kHalf + 64 * kGroup);
  } else {
    const uint8_t* parts = w + 192 * kHalf;
    const __m512i lowest = ShiftWords<-6>(_mm512_loadu_si512(parts));
    const __m512i middle = ShiftWords<-4>(_mm512_loadu_si512(parts + 64));
    const __m512i highest = ShiftWords<-2>(_mm512_loadu_si512(parts + 128));
    return SelectBits(_mm512_set1_epi8(0x0f), SelectBits(_mm512_set1_epi8(0x03), lowest, middle),
                      highest);
  }
}

// Adds the products of 4 columns for all rows. `a` are the activations of the half (ArrangeShorts).
template <MatrixFormat F, int R, int kHalf, int kGroup>
TM_HD void DotGroup(const uint8_t* w, const uint8_t* a, __m512i (&sum)[R]) {
  const __m512i bytes = LoadWideCodes<F, kHalf, kGroup>(w);
  const __m512i mask = _mm512_set1_epi16(kWideMask<F>);
  const __m512i even = _mm512_and_si512(bytes, mask);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(bytes, 8), mask);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = DotPairsOf(sum[r], even, a + kQuantRowBytes * r + 8 * kGroup);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = DotPairsOf(sum[r], odd, a + kQuantRowBytes * r + 8 * kGroup + 4);
  }
}

// Adds the products of 16 columns for all rows.
template <MatrixFormat F, int R, int kHalf>
TM_HD void DotHalf(const uint8_t* w, const uint8_t* a, __m512i (&sum)[R]) {
  a += kHalf * kQuantBlock;
  DotGroup<F, R, kHalf, 0>(w, a, sum);
  DotGroup<F, R, kHalf, 1>(w, a, sum);
  DotGroup<F, R, kHalf, 2>(w, a, sum);
  DotGroup<F, R, kHalf, 3>(w, a, sum);
}

// Adds 32 columns of kQ6_K for all rows, whose codes take kRowBytes in a step of the panel.
// dot.template operator()<kHalf>(sum) adds the products of 16 columns.
template <int R, int kRowBytes, class DotFn>
TM_HD void AddQ6StepWith(const KScales& own, const uint8_t* a, __m512 (&acc)[R], const DotFn& dot) {
  const uint8_t* scales = a + R * kRowBytes;  // float d[R]
  const uint8_t* offsets = scales + R * 4;    // int32[2][R]
  __m512i sum[R];
  __m512 first[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r] = Broadcast32(offsets + 4 * r);
  }
  dot.template operator()<0>(sum);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    first[r] = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, sum[r]), own.scale);
    sum[r] = Broadcast32(offsets + 4 * (R + r));
  }
  dot.template operator()<1>(sum);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const __m512 both =
        _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sum[r]), own.second, first[r]);
    acc[r] = _mm512_fmadd_ps(both, BroadcastFloat(scales + 4 * r), acc[r]);
  }
}

// Scales and adds the sums of 32 columns of kQ4_K or kQ5_K for all rows.
template <int R, int kRowBytes>
TM_HD void AddKSums(const __m512i (&sum)[R], const KScales& own, const uint8_t* a,
                    __m512 (&acc)[R]) {
  const uint8_t* scales = a + R * kRowBytes;  // float d[R]
  const uint8_t* offsets = scales + R * 4;    // float d*sum[R]
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    acc[r] = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sum[r]),
                             _mm512_mul_ps(own.scale, BroadcastFloat(scales + 4 * r)), acc[r]);
    acc[r] = _mm512_fnmadd_ps(own.second, BroadcastFloat(offsets + 4 * r), acc[r]);
  }
}

// Adds 32 columns for all rows. `w` are their codes.
template <MatrixFormat F, int R>
TM_HD void AddKStep(const uint8_t* w, const KScales& own, const uint8_t* a, __m512 (&acc)[R]) {
  if constexpr (F == MatrixFormat::kQ6_K) {
    AddQ6StepWith<R, kQuantRowBytes>(
        own, a, acc, [&]<int kHalf>(__m512i(&sum)[R]) __attribute__((always_inline)) {
          DotHalf<F, R, kHalf>(w, a, sum);
        });
  } else {
    __m512i sum[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r] = _mm512_setzero_si512();
    }
    if constexpr (F == MatrixFormat::kQ4_K) {
      DotBlock<F, R>(w, a, sum);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_slli_epi32(sum[r], 8);
      }
      DotBlock<F, R>(w, a + kQuantBlock, sum);
    } else {
      DotHalf<F, R, 0>(w, a, sum);
      DotHalf<F, R, 1>(w, a, sum);
    }
    AddKSums<R, kQuantRowBytes>(sum, own, a, acc);
  }
}

// Multiplies T tiles. add_step(codes, scales, panel step, acc) adds one step of a tile; a step of
// the panel takes kPanelStep bytes.
template <MatrixFormat F, int R, int T, int kPanelStep, class AddFn>
TM_HD void MultiplyKTilesWith(const TileRun& run, const AddFn& add_step) {
  constexpr int kStepShare = TileSuperBlockBytes(F) / kKSteps;  // of the bytes to prefetch
  __m512 acc[T][R];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[t][r] = _mm512_setzero_ps();
    }
  }
  const uint8_t* next = run.next;
  const uint8_t* a = run.panel;
  const uint8_t* block = run.tile;
  for (int64_t s = 0; s < run.steps; s += kKSteps, block += TileSuperBlockBytes(F)) {
#pragma GCC unroll 1
    for (int step = 0; step < kKSteps; ++step) {
      if constexpr (R > 1) {  // one row relies on the hardware prefetcher
#pragma GCC unroll 14
        for (int line = 0; line < T * kStepShare; line += 64) {
          _mm_prefetch(next + line, _MM_HINT_T0);
        }
        next += T * kStepShare;
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const uint8_t* of_tile = block + t * run.tile_bytes;
        add_step(of_tile + KCodesAt(F) + step * TileStepBytes(F), LoadKScales<F>(of_tile, step), a,
                 acc[t]);
      }
      a += kPanelStep;
    }
  }
  StoreTiles<F, R, T>(run, acc);
}

template <MatrixFormat F, int R, int T>
void MultiplyKTiles(const TileRun& run) {
  MultiplyKTilesWith<F, R, T, PanelStepBytes(F, R)>(
      run, [](const uint8_t* w, const KScales& own, const uint8_t* a, __m512(&acc)[R])
               __attribute__((always_inline)) { AddKStep<F, R>(w, own, a, acc); });
}

}  // namespace turbomind::TM_ISA
