#include "turbomind/backend/cpu/cpu_isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string_view>

#include "turbomind/backend/cpu/row_kernels.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr std::string_view kBuilt = TM_CPU_ISAS;  // names, separated by spaces

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
  struct Isa {
    const char* name;
    bool (*can_run)();
  };
  constexpr Isa kIsas[] = {{"scalar", [] { return true; }},
                           {"avx2", CanRunAvx2},
                           {"avx512", CanRunAvx512},
                           {"amx", [] { return CanRunAvx512() && CanRunAmx(); }}};
  std::vector<std::string> isas;
  for (const Isa& isa : kIsas) {
    if (kBuilt.find(isa.name) != kBuilt.npos && isa.can_run()) {
      isas.emplace_back(isa.name);
    }
  }
  if (isas.empty()) {
    throw InvalidArgument("This build has kernels for " + std::string(kBuilt) +
                          " alone, which this machine cannot run. Build with "
                          "CMAKE_ARGS=-DTM_CPU_ISAS=all for every machine.");
  }
  return isas;
}

CpuRowKernels FastestCpuRowKernels() {
  CpuRowKernels kernels;
  const std::string isa = AvailableCpuIsas().back();
  if (isa == "avx512" || isa == "amx") {
    avx512::FillRowKernels(kernels);
  } else if (isa == "avx2") {
    avx2::FillRowKernels(kernels);
  } else {
    scalar::FillRowKernels(kernels);
  }
  return kernels;
}

}  // namespace turbomind
