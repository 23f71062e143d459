#include "turbomind/backend/cpu/cpu_isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "turbomind/backend/cpu/row_kernels.h"

namespace turbomind {
namespace {

bool CanRunAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool CanRunAvx512() {
  return CanRunAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

// Checks for AMX and asks the operating system for permission. The system saves the tile registers,
// 8 KB per thread, only for processes that have requested it.
bool CanRunAmx() {
  constexpr unsigned kTiles = 1u << 24;
  constexpr unsigned kInt8 = 1u << 25;
  constexpr unsigned kBf16 = 1u << 22;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTiles) == 0 || (d & kInt8) == 0 ||
      (d & kBf16) == 0) {
    return false;
  }
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILE_DATA
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
}

}  // namespace

std::vector<std::string> AvailableCpuIsas() {
  std::vector<std::string> isas = {"scalar"};
  if (CanRunAvx2()) {
    isas.push_back("avx2");
  }
  if (CanRunAvx512()) {
    isas.push_back("avx512");
    if (CanRunAmx()) {
      isas.push_back("amx");
    }
  }
  return isas;
}

CpuRowKernels FastestCpuRowKernels() {
  CpuRowKernels kernels;
  if (CanRunAvx512()) {
    avx512::FillRowKernels(kernels);
  } else if (CanRunAvx2()) {
    avx2::FillRowKernels(kernels);
  } else {
    scalar::FillRowKernels(kernels);
  }
  return kernels;
}

}  // namespace turbomind
