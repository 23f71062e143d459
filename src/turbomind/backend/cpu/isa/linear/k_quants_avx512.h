#pragma once

// The kernels for AVX-512 and AMX have no K-quants: the loader converts them to formats that these
// kernels read without unpacking scales (CpuDenseKernels::has_k_quants).

#include "turbomind/backend/cpu/isa/linear/linear.h"

namespace turbomind::TM_ISA {

inline constexpr bool kComputesKQuants = false;

// The device packs no such matrix.
template <MatrixFormat F, int R>
void MultiplyKTile(const TileRun& /*run*/) {
  __builtin_trap();
}

}  // namespace turbomind::TM_ISA
