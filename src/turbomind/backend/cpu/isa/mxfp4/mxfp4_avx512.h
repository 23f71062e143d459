#pragma once

// MXFP4 with AVX-512 VNNI. A register holds 4 blocks of one output's row. Four outputs are
// processed together, so that one transposition gives a register of 16 sums: lane 4 * block +
// output.
//
// Per step (128 columns, 4 outputs: 272 bytes of weights): 12 instructions to look codes up and
// about 10 for the scales. Per row of activations: 16 vpdpbusd, 4 shifts, 9 to transpose, 4 to
// scale. One row takes 35 to 40 cycles on Zen 4, 7 bytes per cycle, which is the memory bandwidth
// of one core. The next rows are prefetched in the order of their bytes. Without that, or column by
// column, a core reads half as much or less.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/mxfp4/mxfp4.h"

namespace turbomind::TM_ISA {

TM_HD __mmask64 FirstBytes(int64_t count) {
  return count <= 0 ? 0 : count >= 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
}

// Loads `count` bytes followed by zeros. Bytes after them are not read.
template <bool kAll>
TM_HD __m512i LoadBytes(const uint8_t* p, int64_t count) {
  if constexpr (kAll) {
    return _mm512_loadu_si512(p);
  } else {
    return _mm512_maskz_loadu_epi8(FirstBytes(count), p);
  }
}

// Loads the exponents of up to 4 blocks, like LoadBytes.
template <bool kAll>
TM_HD __m128i LoadExponents(const uint8_t* p, int64_t count) {
  if constexpr (kAll) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return _mm_cvtsi32_si128(four);
  } else {
    return _mm_maskz_loadu_epi8(static_cast<__mmask16>((1 << count) - 1), p);
  }
}

// The weights of the 4 outputs in one step.
struct MxWeights {
  __m512i low[kMxOutputs];  // looked up: 2 * E2M1 + 12
  __m512i high[kMxOutputs];
  __m512 scales;  // lane 4 * block + output
};

// The table of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, times 2, plus 12. It is repeated four
// times, because a permutation of bytes uses six bits of each index: a nibble needs no mask.
TM_HD __m512i CodeTable() {
  return _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

TM_HD __m512i LookUpLow(__m512i codes) { return _mm512_permutexvar_epi8(codes, CodeTable()); }

TM_HD __m512i LookUpHigh(__m512i codes) {
  return _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), CodeTable());
}

TM_HD void LookUp(__m512i codes, int o, MxWeights& w) {
  w.low[o] = LookUpLow(codes);
  w.high[o] = LookUpHigh(codes);
}

// Converts exponents to powers of two. The same bit makes 0 a subnormal and 255 a NaN.
TM_HD __m512 PowersOfTwo(__m128i e) {
  const __mmask16 ends = _mm_testn_epi8_mask(_mm_add_epi8(e, _mm_set1_epi8(1)),
                                             _mm_set1_epi8(static_cast<char>(0xfe)));
  const __m512i bits = _mm512_slli_epi32(_mm512_maskz_cvtepu8_epi32(0xffff, e), 23);
  return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, ends, bits, _mm512_set1_epi32(0x00400000)));
}

// Loads a step of `count` blocks. REQUIRES: kAll == (count == 4).
template <bool kAll>
TM_HD MxWeights LoadSplit(const MxRun& run, int64_t step, int64_t count) {
  MxWeights w;
  __m128i e[kMxOutputs];
#pragma GCC unroll 4
  for (int o = 0; o < kMxOutputs; ++o) {
    LookUp(LoadBytes<kAll>(run.rows[o] + step * kMxStepBytes, 16 * count), o, w);
    e[o] = LoadExponents<kAll>(run.scales[o] + step * kMxStepBlocks, count);
  }
  w.scales =
      PowersOfTwo(_mm_unpacklo_epi16(_mm_unpacklo_epi8(e[0], e[1]), _mm_unpacklo_epi8(e[2], e[3])));
  return w;
}

// The position of code byte i in the 68 bytes of a step. The first 64 bytes are the permutation's
// first table; the bytes from the fourth one on are its second.
struct BlockIndex {
  alignas(64) uint8_t codes[64];
  alignas(16) uint8_t scales[16];  // for two outputs, each pair twice
};

constexpr BlockIndex MakeBlockIndex() {
  BlockIndex index = {};
  for (int i = 0; i < 64; ++i) {
    const int at = i / 16 * 17 + 1 + i % 16;
    index.codes[i] = static_cast<uint8_t>(at < 64 ? at : 64 + at - 4);
  }
  for (int i = 0; i < 16; ++i) {
    index.scales[i] = static_cast<uint8_t>(i / 4 * 17 + i % 2 * 64);
  }
  return index;
}

inline constexpr BlockIndex kBlockIndex = MakeBlockIndex();

template <bool kAll>
TM_HD MxWeights LoadBlocks(const MxRun& run, int64_t step, int64_t count) {
  MxWeights w;
  const __m512i index = _mm512_load_si512(kBlockIndex.codes);
  const __m512i scale_index =
      _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<const __m128i*>(kBlockIndex.scales)));
  __m512i first[kMxOutputs];
#pragma GCC unroll 4
  for (int o = 0; o < kMxOutputs; ++o) {
    const uint8_t* at = run.rows[o] + step * (17 * kMxStepBlocks);
    first[o] = LoadBytes<kAll>(at, 17 * count);
    const __m512i rest = LoadBytes<kAll>(at + 4, 17 * count - 4);
    LookUp(_mm512_permutex2var_epi8(first[o], index, rest), o, w);
  }
  const __m512i e01 = _mm512_permutex2var_epi8(first[0], scale_index, first[1]);
  const __m512i e23 = _mm512_permutex2var_epi8(first[2], scale_index, first[3]);
  w.scales =
      PowersOfTwo(_mm_blend_epi16(_mm512_castsi512_si128(e01), _mm512_castsi512_si128(e23), 0xaa));
  return w;
}

// Adds 4 lanes each and transposes the sums: lane 4 * block + output.
TM_HD __m512i TransposeAndAdd(const __m512i (&sum)[kMxOutputs]) {
  const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]),
                                     _mm512_unpackhi_epi32(sum[0], sum[1]));
  const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]),
                                     _mm512_unpackhi_epi32(sum[2], sum[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

TM_HD __m512 AddMxStep(const MxWeights& w, const MxPanelRow& x, __m512 acc) {
  const __m512i high[2] = {_mm512_loadu_si512(x.high[0]), _mm512_loadu_si512(x.high[1])};
  const __m512i low[2] = {_mm512_loadu_si512(x.low[0]), _mm512_loadu_si512(x.low[1])};
  __m512i sum[kMxOutputs];
#pragma GCC unroll 4
  for (int o = 0; o < kMxOutputs; ++o) {
    sum[o] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.low[o], high[0]);
    sum[o] = _mm512_slli_epi32(_mm512_dpbusd_epi32(sum[o], w.high[o], high[1]), 8);
    sum[o] = _mm512_dpbusd_epi32(sum[o], w.low[o], low[0]);
    sum[o] = _mm512_dpbusd_epi32(sum[o], w.high[o], low[1]);
  }
  const __m512i dot = _mm512_add_epi32(TransposeAndAdd(sum), _mm512_loadu_si512(x.offsets));
  const __m512 scaled =
      _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, dot), _mm512_loadu_ps(x.scales));
  return _mm512_fmadd_ps(scaled, w.scales, acc);
}

TM_HD void StoreMxRow(const MxRun& run, int r, __m512 acc) {
  const __m128 sums = _mm_add_ps(_mm_add_ps(_mm512_maskz_extractf32x4_ps(0xf, acc, 0),
                                            _mm512_maskz_extractf32x4_ps(0xf, acc, 1)),
                                 _mm_add_ps(_mm512_maskz_extractf32x4_ps(0xf, acc, 2),
                                            _mm512_maskz_extractf32x4_ps(0xf, acc, 3)));
  const __mmask8 lanes = static_cast<__mmask8>((1 << run.num_outputs) - 1);
  float* y = run.y + r * run.y_stride;
  __m128 out = sums;
  if (run.bias != nullptr) {
    out = _mm_add_ps(out, _mm_maskz_loadu_ps(lanes, run.bias));
  }
  if (run.accumulate) {
    out = _mm_add_ps(out, _mm_maskz_loadu_ps(lanes, y));
  }
  _mm_mask_storeu_ps(y, lanes, out);
}

// Adds one step of `count` blocks. REQUIRES: kAll == (count == 4).
template <MatrixFormat F, int R, bool kAll>
TM_HD void AddMxSteps(const MxRun& run, int64_t step, int64_t count, __m512 (&acc)[R]) {
  MxWeights w;
  if constexpr (F == MatrixFormat::kMxfp4) {
    w = LoadBlocks<kAll>(run, step, count);
  } else {
    w = LoadSplit<kAll>(run, step, count);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    acc[r] = AddMxStep(w, MxRowAt(run.panel, step, R, r), acc[r]);
  }
}

template <MatrixFormat F, int R>
void MultiplyMxRows(const MxRun& run) {
  __m512 acc[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    acc[r] = _mm512_setzero_ps();
  }
  const int64_t full = run.blocks / kMxStepBlocks;
  for (int64_t s = 0; s < full; ++s) {
    PrefetchStep<F>(run, s);
    AddMxSteps<F, R, true>(run, s, kMxStepBlocks, acc);
  }
  if (full * kMxStepBlocks < run.blocks) {
    PrefetchStep<F>(run, full);
    AddMxSteps<F, R, false>(run, full, run.blocks - full * kMxStepBlocks, acc);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    StoreMxRow(run, r, acc[r]);
  }
}

}  // namespace turbomind::TM_ISA
