#pragma once

// Tile registers of AMX: eight, of up to 16 rows of 64 bytes. Instructions by name: GCC 12's
// intrinsics take no constant expressions for registers, and do not tell the compiler what they
// read: it drops stores of a configuration but for its first 8 bytes, and may move others.

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

// What the processor reads to shape its tile registers (palette 1).
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

// This thread's registers have a shape, and zeros, while this lives.
class TileConfig {
 public:
  explicit TileConfig(const TileShape& shape) {
    asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
  }
  ~TileConfig() { asm volatile("tilerelease" ::: "memory"); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

// Rows `stride` bytes apart → register T.
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

// The same with unsigned bytes in A.
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
