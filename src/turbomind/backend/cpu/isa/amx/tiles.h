#pragma once

// The eight AMX tile registers, each with up to 16 rows of 64 bytes. The instructions are inline
// assembly for two reasons. GCC 12's intrinsics do not accept constant expressions as register
// numbers. They also do not declare the memory that they read: the compiler drops stores to a
// configuration except for its first 8 bytes, and may reorder others.

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

// The memory layout of the tile configuration (palette 1).
struct TileShape {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void Set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShape) == 64);

// Configures the tile registers of this thread, filled with zeros, and releases them at the end.
class TileConfig {
 public:
  explicit TileConfig(const TileShape& shape) {
    asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
  }
  ~TileConfig() { asm volatile("tilerelease" ::: "memory"); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

// Loads rows `stride` bytes apart into register T.
template <int T>
TM_HD void LoadTile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(T) : "memory");
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
