// Replaces backend/cpu/cpu_isa.cc: a machine with AVX2 can run every instruction set here.

#include "turbomind/backend/cpu/cpu_isa.h"

#include "turbomind/backend/cpu/row_kernels.h"

namespace turbomind {

std::vector<std::string> AvailableCpuIsas() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return {"scalar"};
  }
  return {"scalar", "avx2", "avx512", "amx"};
}

CpuRowKernels FastestCpuRowKernels() {
  CpuRowKernels kernels;
  if (AvailableCpuIsas().size() > 1) {
    avx512::FillRowKernels(kernels);
  } else {
    scalar::FillRowKernels(kernels);
  }
  return kernels;
}

}  // namespace turbomind
