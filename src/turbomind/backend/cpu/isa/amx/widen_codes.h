#pragma once

// Widens the codes of weights to int8 or BF16, as the tile registers multiply them.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/linear.h"
#include "turbomind/backend/cpu/isa/linear/k_quants_avx512.h"
#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind::TM_ISA {

// Bytes of the widened codes of a tile's block: int8[8][16 outputs][4 columns] or bf16[16][16
// outputs][2]. kQ6_K and kNvfp4 have bf16[8][16 outputs][2] for each half of the columns, twice.
constexpr int CodeBytes(MatrixFormat format) {
  return kTileRows * kQuantBlock * (InBytes(format) ? 1 : HasHalfScales(format) ? 4 : 2);
}

// The values of codes as BF16, stored twice for codes of 4 bits. A permutation of 32 words uses
// five bits of each index and one of 64 words six bits, so a code needs no mask.
template <int kCount>
struct CodeWords {
  alignas(64) uint16_t of[kCount];
};

template <int kCount>
constexpr CodeWords<kCount> MakeCodeWords(MatrixFormat format) {
  CodeWords<kCount> words = {};
  for (int i = 0; i < kCount; ++i) {
    const int code = format == MatrixFormat::kQ6_K ? i : i % 16;
    const bool is_e2m1 = IsMxfp4(format) || format == MatrixFormat::kNvfp4;
    const int value = is_e2m1 ? kDoubledE2m1[code] : code - ZeroPoint(format);
    int magnitude = value < 0 ? -value : value;
    int exponent = 127 + 7;  // for an 8-bit significand whose first bit is set
    while (magnitude != 0 && magnitude < 128) {
      magnitude *= 2;
      --exponent;
    }
    const int bits = magnitude == 0 ? 0 : exponent << 7 | (magnitude & 0x7f);
    words.of[i] = static_cast<uint16_t>(bits | (value < 0 ? 0x8000 : 0));
  }
  return words;
}

template <MatrixFormat F>
constexpr auto kCodeWords = MakeCodeWords<F == MatrixFormat::kQ6_K ? 64 : 32>(F);

static_assert(kCodeWords<MatrixFormat::kQ4_0>.of[0] == 0xc100);   // -8
static_assert(kCodeWords<MatrixFormat::kQ4_1>.of[31] == 0x4170);  // 15
static_assert(kCodeWords<MatrixFormat::kMxfp4>.of[8] == 0);       // -0 counts as 0
static_assert(kCodeWords<MatrixFormat::kQ6_K>.of[0] == 0xc200);   // -32
static_assert(kCodeWords<MatrixFormat::kQ6_K>.of[63] == 0x41f8);  // 31

TM_HD void WidenNibbles(const uint8_t* codes, const uint16_t* values, uint8_t* to) {
  const __m512i words = _mm512_load_si512(values);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512i v = _mm512_loadu_si512(codes + 64 * g);
    uint8_t* at = to + 256 * g;
    _mm512_store_si512(at, _mm512_permutexvar_epi16(v, words));
    _mm512_store_si512(at + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), words));
    _mm512_store_si512(at + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), words));
    _mm512_store_si512(at + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), words));
  }
}

// Stores two lines of group `group` of a half of the columns. The lines of a half appear twice, 8
// lines apart.
TM_HD void StoreHalfLines(__m512i even, __m512i odd, int half, int group, uint8_t* to) {
  uint8_t* at = to + 1024 * half + 128 * group;
  _mm512_store_si512(at, even);
  _mm512_store_si512(at + 64, odd);
  _mm512_store_si512(at + 512, even);
  _mm512_store_si512(at + 576, odd);
}

TM_HD void WidenNvCodes(const uint8_t* codes, uint8_t* to) {
  const __m512i words = _mm512_load_si512(kCodeWords<MatrixFormat::kNvfp4>.of);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512i v = _mm512_loadu_si512(codes + 64 * g);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i own = _mm512_srli_epi16(v, 4 * half);
      StoreHalfLines(_mm512_permutexvar_epi16(own, words),
                     _mm512_permutexvar_epi16(_mm512_srli_epi16(own, 8), words), half, g, to);
    }
  }
}

template <int kHalf, int kGroup>
TM_HD void WidenFiveBits(const uint8_t* codes, uint8_t* to) {
  const __m512i v = LoadWideCodes<MatrixFormat::kQ5_K, kHalf, kGroup>(codes);
  _mm512_store_si512(to + 64 * (4 * kHalf + kGroup), _mm512_and_si512(v, _mm512_set1_epi8(0x1f)));
}

// Widens 4 columns.
template <int kHalf, int kGroup>
TM_HD void WidenSixBits(const uint8_t* codes, uint8_t* to) {
  const uint16_t* values = kCodeWords<MatrixFormat::kQ6_K>.of;
  const __m512i low = _mm512_load_si512(values);
  const __m512i high = _mm512_load_si512(values + 32);
  const __m512i v = LoadWideCodes<MatrixFormat::kQ6_K, kHalf, kGroup>(codes);
  const __m512i even = _mm512_permutex2var_epi16(low, v, high);
  const __m512i odd = _mm512_permutex2var_epi16(low, _mm512_srli_epi16(v, 8), high);
  StoreHalfLines(even, odd, kHalf, kGroup, to);
}

// Widens the codes of one block of a tile.
template <MatrixFormat F>
TM_HD void WidenBlock(const uint8_t* codes, uint8_t* to) {
  if constexpr (F == MatrixFormat::kQ8_0) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __m512i v = _mm512_loadu_si512(codes + 64 * g);
      _mm512_store_si512(to + 64 * g, _mm512_xor_si512(v, _mm512_set1_epi8(-128)));
    }
  } else if constexpr (F == MatrixFormat::kQ5_K) {
    const auto half = [&]<int kHalf>() __attribute__((always_inline)) {
      WidenFiveBits<kHalf, 0>(codes, to);
      WidenFiveBits<kHalf, 1>(codes, to);
      WidenFiveBits<kHalf, 2>(codes, to);
      WidenFiveBits<kHalf, 3>(codes, to);
    };
    half.template operator()<0>();
    half.template operator()<1>();
  } else if constexpr (F == MatrixFormat::kQ6_K) {
    const auto half = [&]<int kHalf>() __attribute__((always_inline)) {
      WidenSixBits<kHalf, 0>(codes, to);
      WidenSixBits<kHalf, 1>(codes, to);
      WidenSixBits<kHalf, 2>(codes, to);
      WidenSixBits<kHalf, 3>(codes, to);
    };
    half.template operator()<0>();
    half.template operator()<1>();
  } else if constexpr (F == MatrixFormat::kNvfp4) {
    WidenNvCodes(codes, to);
  } else {
    WidenNibbles(codes, kCodeWords<F>.of, to);
  }
}

}  // namespace turbomind::TM_ISA
