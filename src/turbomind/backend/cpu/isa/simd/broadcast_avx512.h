#pragma once

// Broadcast four bytes of an activation panel to every lane.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

TM_HD __m512i Broadcast32(const uint8_t* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return _mm512_set1_epi32(bits);
}

TM_HD __m512 BroadcastFloat(const uint8_t* p) {
  float value;
  __builtin_memcpy(&value, p, sizeof(value));
  return _mm512_set1_ps(value);
}

}  // namespace turbomind::TM_ISA
