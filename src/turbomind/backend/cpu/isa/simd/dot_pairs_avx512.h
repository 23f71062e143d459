#pragma once

// The products of pairs of int16 and of bytes, in a header of its own because tests replace it
// (tests/cpp/cpu_shim).

#include <immintrin.h>

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

// Returns sum + a.low * b.low + a.high * b.high in each dword.
TM_HD __m512i DotPairs(__m512i sum, __m512i a, __m512i b) {
  // Use asm: with the intrinsic, GCC 12 copies every sum of an array through the stack.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// Returns DotPairs(sum, a, b) for the same pair `b` in each dword.
TM_HD __m512i DotPairsOf(__m512i sum, __m512i a, const void* b) {
  const auto& pair = *static_cast<const int16_t(*)[2]>(b);
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(pair));
  return sum;
}

// Returns sum + the products of four unsigned bytes of a with the four signed ones at b.
TM_HD __m512i DotBytesOf(__m512i sum, __m512i a, const void* b) {
  const auto& bytes = *static_cast<const int8_t(*)[4]>(b);
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(bytes));
  return sum;
}

}  // namespace turbomind::TM_ISA
