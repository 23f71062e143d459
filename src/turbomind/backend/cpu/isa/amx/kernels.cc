// The kernels of a machine with AMX: the AVX-512 kernels, except where tiles are faster.

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/isa/amx/bf16_linear.h"
#include "turbomind/backend/cpu/isa/amx/linear.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::amx {
void PrefillRows(const PrefillRowsArgs& args);
void PrefillRowsBf16(const PrefillRowsArgs& args);

void FillDenseKernels(CpuDenseKernels& kernels) {
  avx512::FillDenseKernels(kernels);
  kernels.pack_panel = PackPanel;
  kernels.plan_panels = PlanPanels;
  kernels.multiply = Multiply;
  kernels.scratch_bytes = ScratchBytes;
}

void FillInt8Kernels(CpuDenseKernels& kernels) {
  avx512::FillInt8Kernels(kernels);
  kernels.pack_panel = PackInt8Panel;
  kernels.plan_panels = PlanInt8Panels;
  kernels.multiply = MultiplyInt8;
}

void FillBf16Kernels(CpuDenseKernels& kernels) {
  kernels.pack_panel = PackBf16Panel;
  kernels.plan_panels = PlanBf16Panels;
  kernels.multiply = MultiplyBf16;
  kernels.scratch_bytes = Bf16ScratchBytes;
}

void FillKvKernels(CpuKvKernels& kernels) {
  avx512::FillKvKernels(kernels);
  kernels.prefill_rows = PrefillRows;
}

void FillBf16KvKernels(CpuKvKernels& kernels) {
  kernels.prefill_rows = PrefillRowsBf16;
  kernels.item_rows = 2 * kPrefillRows;  // unpacking a tile takes longer than 16 rows
}

}  // namespace turbomind::amx
