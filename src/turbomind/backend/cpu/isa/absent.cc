// Compiled instead of the kernels of an instruction set that a build leaves out (TM_CPU_ISAS).
// AvailableCpuIsas does not name such a set, so that none of these functions is called.

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/backend/cpu/recurrent_kernels.h"
#include "turbomind/backend/cpu/row_kernels.h"
#include "turbomind/core/check.h"

namespace turbomind::TM_ISA {
namespace {

[[noreturn]] void Refuse() {
  throw InternalError("This build has no kernels for the instruction set.");
}

}  // namespace

void FillDenseKernels(CpuDenseKernels& /*kernels*/) { Refuse(); }
void FillInt8Kernels(CpuDenseKernels& /*kernels*/) { Refuse(); }
void FillKvKernels(CpuKvKernels& /*kernels*/) { Refuse(); }
#if defined(TM_ISA_amx)
void FillBf16Kernels(CpuDenseKernels& /*kernels*/) { Refuse(); }
void FillBf16KvKernels(CpuKvKernels& /*kernels*/) { Refuse(); }
#else
void FillRowKernels(CpuRowKernels& /*kernels*/) { Refuse(); }
void FillRecurrentKernels(CpuRecurrentKernels& /*kernels*/) { Refuse(); }
#endif
#if defined(TM_ISA_avx512) && !defined(TM_ISA_amx)
void FillInt12Kernels(CpuDenseKernels& /*kernels*/) { Refuse(); }
#endif

}  // namespace turbomind::TM_ISA
