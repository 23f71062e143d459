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
  kernels.linear = {.pack_panel = PackPanel,
                    .plan_panels = PlanPanels,
                    .multiply = Multiply,
                    .scratch_bytes = ScratchBytes};
}

void FillInt8Kernels(CpuDenseKernels& kernels) {
  kernels.coarse = {.computes = [](MatrixFormat format) { return HasInt8Panels(format); },
                    .pack_panel = PackInt8Panel,
                    .plan_panels = PlanInt8Panels,
                    .multiply = MultiplyInt8,
                    .scratch_bytes = ScratchBytes};
}

void FillBf16Kernels(CpuDenseKernels& kernels) {
  kernels.coarse = {.computes = [](MatrixFormat format) { return HasBf16Tiles(format); },
                    .min_rows = kMinBf16Rows,
                    .pack_panel = PackBf16Panel,
                    .plan_panels = PlanBf16Panels,
                    .multiply = MultiplyBf16,
                    .scratch_bytes = Bf16ScratchBytes};
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
