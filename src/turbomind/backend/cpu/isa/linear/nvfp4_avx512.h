#pragma once

// The kernels for AVX-512 and AMX have no NVFP4: the loader converts it to Q8_0
// (CpuDenseKernels::has_nvfp4).

#include "turbomind/backend/cpu/isa/linear/linear.h"

namespace turbomind::TM_ISA {

inline constexpr bool kComputesNvfp4 = false;

// The device packs no such matrix.
template <int R>
void MultiplyNvTile(const TileRun& /*run*/) {
  __builtin_trap();
}

}  // namespace turbomind::TM_ISA
