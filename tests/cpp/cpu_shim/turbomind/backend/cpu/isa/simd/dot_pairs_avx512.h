#pragma once

// Replaces the header of the same name in src.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

TM_HD __m512i DotPairs(__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }

TM_HD __m512i DotPairsOf(__m512i sum, __m512i a, const void* b) {
  int32_t pair;
  __builtin_memcpy(&pair, b, sizeof(pair));
  return _mm512_dpwssd_epi32(sum, a, _mm512_set1_epi32(pair));
}

TM_HD __m512i DotBytesOf(__m512i sum, __m512i a, const void* b) {
  int32_t bytes;
  __builtin_memcpy(&bytes, b, sizeof(bytes));
  return _mm512_dpbusd_epi32(sum, a, _mm512_set1_epi32(bytes));
}

}  // namespace turbomind::TM_ISA
