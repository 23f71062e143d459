#pragma once

// Unpacks weights to BF16 with their scales and minima inside, as tile registers multiply them: a
// step of 32 columns of a tile of 16 outputs is bf16[16][16 outputs][2 columns].
//
// A word of packed codes holds several columns of an output. The words of 8 outputs are extended to
// 32 bits, so that lanes 2 i and 2 i + 1 have the columns c and c + 2 of output i (kMxfp4Split: c
// and c + 4). A shift selects other columns. FP32 numbers of 8 and 8 outputs are rounded together,
// which gives the 64 bytes of a row of the register.
//
// 16 weights of 4 bits take a shift, a look-up, a product and half of a rounding. Codes of 5 and 6
// bits are widened to bytes first.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/bf16_linear.h"
#include "turbomind/backend/cpu/isa/linear/k_quants_avx512.h"
#include "turbomind/backend/cpu/isa/linear/linear_avx512.h"
#include "turbomind/backend/cpu/isa/linear/nvfp4_avx512.h"
#include "turbomind/backend/cpu/isa/mxfp4/mxfp4_tiles_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// The values of codes of 4 or 5 bits. Those of NVFP4 are doubled.
template <int kCount>
struct CodeValues {
  alignas(64) float of[kCount];
};

constexpr CodeValues<16> MakeNibbleValues(MatrixFormat format) {
  constexpr float kE2m1[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  CodeValues<16> values = {};
  for (int i = 0; i < 16; ++i) {
    if (IsMxfp4(format)) {
      values.of[i] = i < 8 ? kE2m1[i] : -kE2m1[i - 8];
    } else {
      values.of[i] = static_cast<float>(format == MatrixFormat::kNvfp4 ? kDoubledE2m1[i]
                                                                       : i - ZeroPoint(format));
    }
  }
  return values;
}

constexpr CodeValues<32> MakeFiveBitValues() {
  CodeValues<32> values = {};
  for (int i = 0; i < 32; ++i) {
    values.of[i] = static_cast<float>(i);
  }
  return values;
}

template <MatrixFormat F>
inline constexpr CodeValues<16> kNibbleValues = MakeNibbleValues(F);
inline constexpr CodeValues<32> kFiveBitValues = MakeFiveBitValues();

// What turns the codes of 32 columns, or of 16, into values: code * scale + offset. Lanes 2 i and 2
// i + 1 belong to output i of 8; the second register has the other 8 outputs. Without an offset,
// `offset` is not used.
struct CodeFactors {
  __m512 scale[2];
  __m512 offset[2];
};

// Copies lanes 8 half to 8 half + 7 to two lanes each.
template <int kHalf>
TM_HD __m512 TwiceEach(__m512 x) {
  const __m512i from = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(_mm512_add_epi32(from, _mm512_set1_epi32(8 * kHalf)), x);
}

TM_HD CodeFactors FactorsOf(__m512 scale) {
  const __m512 none = _mm512_setzero_ps();
  return {{TwiceEach<0>(scale), TwiceEach<1>(scale)}, {none, none}};
}

TM_HD CodeFactors FactorsOf(__m512 scale, __m512 offset) {
  return {{TwiceEach<0>(scale), TwiceEach<1>(scale)}, {TwiceEach<0>(offset), TwiceEach<1>(offset)}};
}

// Loads the words of 8 outputs as dwords.
TM_HD __m512i LoadWords(const uint8_t* p) {
  return _mm512_maskz_cvtepu16_epi32(0xffff,
                                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Rounds to nearest even and stores a row of a register.
TM_HD void StoreRow(__m512 first, __m512 second, uint8_t* to) {
  _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Returns the row of a register for group `group` of the packed codes and nibble `nibble` of a
// word.
template <MatrixFormat F>
constexpr int NibbleRow(int group, int nibble) {
  return F == MatrixFormat::kMxfp4Split ? 4 * group + nibble
                                        : 2 * group + nibble % 2 * 8 + nibble / 2;
}

// Unpacks uint8[4][16][4], two codes in a byte, of which the low one has the factors `low`.
template <MatrixFormat F>
TM_HD void UnpackNibbles(const uint8_t* codes, const CodeFactors& low, const CodeFactors& high,
                         uint8_t* to) {
  const __m512 values = _mm512_load_ps(kNibbleValues<F>.of);
  const auto value = [&](__m512i v, int half, const CodeFactors& factors)
      __attribute__((always_inline)) {
    const __m512 code = _mm512_permutexvar_ps(v, values);  // the lowest 4 bits select
    return HasMinimum(F) ? _mm512_fmadd_ps(code, factors.scale[half], factors.offset[half])
                         : _mm512_mul_ps(code, factors.scale[half]);
  };
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    __m512i first = LoadWords(codes + 64 * g);
    __m512i second = LoadWords(codes + 64 * g + 32);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const CodeFactors& factors = n % 2 == 0 ? low : high;
      StoreRow(value(first, 0, factors), value(second, 1, factors), to + 64 * NibbleRow<F>(g, n));
      first = _mm512_srli_epi32(first, 4);
      second = _mm512_srli_epi32(second, 4);
    }
  }
}

template <MatrixFormat F>
TM_HD void UnpackNibbles(const uint8_t* codes, const CodeFactors& factors, uint8_t* to) {
  UnpackNibbles<F>(codes, factors, factors, to);
}

// Converts the first or the second byte of each lane, which holds a word.
struct ByteCodes {
  static TM_HD __m512 First(__m512i v) {
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_and_si512(v, _mm512_set1_epi32(0xff)));
  }
  static TM_HD __m512 Second(__m512i v) {
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_srli_epi32(v, 8));
  }
};

// Converts the lowest 5 bits of these bytes by looking them up, which needs no mask.
struct FiveBitCodes {
  static TM_HD __m512 First(__m512i v) {
    return _mm512_permutex2var_ps(_mm512_load_ps(kFiveBitValues.of), v,
                                  _mm512_load_ps(kFiveBitValues.of + 16));
  }
  static TM_HD __m512 Second(__m512i v) { return First(_mm512_srli_epi32(v, 8)); }
};

// Unpacks uint8[4][16][4], which are 16 columns, to 8 rows.
template <class Codes>
TM_HD void UnpackBytes(const uint8_t* codes, const CodeFactors& factors, uint8_t* to) {
  const auto value = [&](__m512 code, int half) __attribute__((always_inline)) {
    return _mm512_fmadd_ps(code, factors.scale[half], factors.offset[half]);
  };
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512i first = LoadWords(codes + 64 * g);
    const __m512i second = LoadWords(codes + 64 * g + 32);
    StoreRow(value(Codes::First(first), 0), value(Codes::First(second), 1), to + 128 * g);
    StoreRow(value(Codes::Second(first), 0), value(Codes::Second(second), 1), to + 128 * g + 64);
  }
}

inline constexpr int kHalfCodes = 4 * 4 * kTileRows;  // bytes of the codes of 16 columns
inline constexpr int kHalfRows = 8 * 64;              // bytes of their rows in a register

// The codes of a step as bytes.
struct CodeBytesOfStep {
  alignas(64) uint8_t of[2 * kHalfCodes];
};

// The bits above the codes of kQ5_K are undefined, those of kQ6_K are zero.
template <MatrixFormat F>
TM_HD void WidenToBytes(const uint8_t* codes, CodeBytesOfStep& bytes) {
  const auto widen = [&]<int kHalf, int kGroup>() __attribute__((always_inline)) {
    const __m512i v = LoadWideCodes<F, kHalf, kGroup>(codes);
    _mm512_store_si512(
        bytes.of + 64 * (4 * kHalf + kGroup),
        F == MatrixFormat::kQ5_K ? v : _mm512_and_si512(v, _mm512_set1_epi8(kWideMask<F>)));
  };
  widen.template operator()<0, 0>();
  widen.template operator()<0, 1>();
  widen.template operator()<0, 2>();
  widen.template operator()<0, 3>();
  widen.template operator()<1, 0>();
  widen.template operator()<1, 1>();
  widen.template operator()<1, 2>();
  widen.template operator()<1, 3>();
}

// Returns factors for codes from which ZeroPoint is subtracted.
template <MatrixFormat F>
TM_HD CodeFactors FactorsFromZero(__m512 scale) {
  constexpr float kZero = static_cast<float>(-ZeroPoint(F));
  return FactorsOf(scale, _mm512_mul_ps(scale, _mm512_set1_ps(kZero)));
}

// Unpacks step `step` of a tile of a K-quant.
template <MatrixFormat F>
TM_HD void UnpackKStep(const uint8_t* tile, int64_t step, uint8_t* to) {
  const uint8_t* block = tile + step / kKSteps * TileSuperBlockBytes(F);
  const uint8_t* codes = block + KCodesAt(F) + step % kKSteps * TileStepBytes(F);
  const KScales own = LoadKScales<F>(block, static_cast<int>(step % kKSteps));
  CodeBytesOfStep bytes;
  if constexpr (F == MatrixFormat::kQ6_K) {
    WidenToBytes<F>(codes, bytes);
    UnpackBytes<ByteCodes>(bytes.of, FactorsFromZero<F>(own.scale), to);
    UnpackBytes<ByteCodes>(bytes.of + kHalfCodes, FactorsFromZero<F>(own.second), to + kHalfRows);
    return;
  }
  const CodeFactors factors = FactorsOf(own.scale, _mm512_sub_ps(_mm512_setzero_ps(), own.second));
  if constexpr (F == MatrixFormat::kQ5_K) {
    WidenToBytes<F>(codes, bytes);
    UnpackBytes<FiveBitCodes>(bytes.of, factors, to);
    UnpackBytes<FiveBitCodes>(bytes.of + kHalfCodes, factors, to + kHalfRows);
  } else {
    UnpackNibbles<F>(codes, factors, to);
  }
}

// Unpacks step `step` of a tile of NVFP4. The scales and the factor of a tile are those of doubled
// codes, which changes no bit of a product.
TM_HD void UnpackNvStep(const uint8_t* tile, int64_t step, uint8_t* to) {
  constexpr MatrixFormat kFormat = MatrixFormat::kNvfp4;
  const uint8_t* at = tile + kNvHeaderBytes + step * TileStepBytes(kFormat);
  const __m512 factor = _mm512_loadu_ps(tile);
  UnpackNibbles<kFormat>(at + kNvCodesAt, FactorsOf(_mm512_mul_ps(LoadNvScale(at), factor)),
                         FactorsOf(_mm512_mul_ps(LoadNvScale(at + kTileRows), factor)), to);
}

// Unpacks step `step` of a tile. Not for BF16 and MXFP4.
template <MatrixFormat F>
TM_HD void UnpackStep(const uint8_t* tile, int64_t step, uint8_t* to) {
  if constexpr (IsKQuant(F)) {
    return UnpackKStep<F>(tile, step, to);
  } else if constexpr (F == MatrixFormat::kNvfp4) {
    return UnpackNvStep(tile, step, to);
  } else {
    const uint8_t* at = tile + step * TileStepBytes(F);
    const uint8_t* codes = at + TileMetaBytes(F);
    const __m512 d = LoadHalf16(at);
    if constexpr (F == MatrixFormat::kQ8_0) {
      const CodeFactors factors = FactorsFromZero<F>(d);
      UnpackBytes<ByteCodes>(codes, factors, to);
      UnpackBytes<ByteCodes>(codes + kHalfCodes, factors, to + kHalfRows);
    } else if constexpr (F == MatrixFormat::kQ4_1) {
      UnpackNibbles<F>(codes, FactorsOf(d, LoadHalf16(at + 32)), to);
    } else {
      UnpackNibbles<F>(codes, FactorsOf(d), to);
    }
  }
}

// Copies a step of BF16 weights, of which the columns exist that `num_rows` rows of a register
// hold.
TM_HD void CopyRows(const uint8_t* from, int64_t num_rows, uint8_t* to) {
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    const __m512i row = r < num_rows ? _mm512_loadu_si512(from + 64 * r) : _mm512_setzero_si512();
    _mm512_store_si512(to + 64 * r, row);
  }
}

// Unpacks a block that TransposeBlocks has written.
template <MatrixFormat F>
TM_HD void UnpackMxBlock(const uint8_t* block, uint8_t* to) {
  UnpackNibbles<F>(block, FactorsOf(_mm512_loadu_ps(block + kMxTileCodes)), to);
}

}  // namespace turbomind::TM_ISA
