#pragma once

// The AMX instructions, in a header of their own because tests replace it (tests/cpp/cpu_shim).
// They are inline assembly for two reasons. GCC 12's intrinsics do not accept constant expressions
// as register numbers. They also do not declare the memory that they read: the compiler drops
// stores to a configuration except for its first 8 bytes, and may reorder others.

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

// Configures the registers from 64 bytes (TileShape) and fills them with zeros.
TM_HD void LoadTileConfig(const void* shape) {
  asm volatile("ldtilecfg (%0)" ::"r"(shape) : "memory");
}

TM_HD void ReleaseTiles() { asm volatile("tilerelease" ::: "memory"); }

// Loads rows `stride` bytes apart into register T.
template <int T>
TM_HD void LoadTile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(T) : "memory");
}

// Does the same with the hint that the rows need not stay in L1.
template <int T>
TM_HD void LoadStreamedTile(const void* rows, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(T) : "memory");
}

template <int T>
TM_HD void StoreTile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(T) : "memory");
}

template <int T>
TM_HD void ZeroTile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// C[m][n] += Σ A[m][k] B[k / 4][n][k % 4], int8 by int8, exact modulo 2^32.
template <int C, int A, int B>
TM_HD void DotBytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Computes the same product with unsigned bytes in A.
template <int C, int A, int B>
TM_HD void DotUnsigned() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// C[m][n] += Σ A[m][k] B[k / 2][n][k % 2], BF16 by BF16, sums in FP32.
template <int C, int A, int B>
TM_HD void DotBf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace turbomind::TM_ISA
