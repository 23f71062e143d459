// The kernels of a machine with AMX: the AVX-512 kernels, except where tiles are faster.

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/isa/amx/linear.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::amx {
void PrefillRows(const PrefillRowsArgs& args);

void FillDenseKernels(CpuDenseKernels& kernels) {
  avx512::FillDenseKernels(kernels);
  kernels.pack_panel = PackPanel;
  kernels.panel_bytes = FullPanelBytes;
  kernels.multiply = Multiply;
  kernels.scratch_bytes = ScratchBytes;
  kernels.row_block_bytes = 1 << 20;
  kernels.mxfp4_row_block_bytes = 1 << 20;
}

void FillInt8Kernels(CpuDenseKernels& kernels) {
  avx512::FillInt8Kernels(kernels);
  kernels.pack_panel = PackInt8Panel;
  kernels.panel_bytes = FullInt8PanelBytes;
  kernels.multiply = MultiplyInt8;
}

void FillKvKernels(CpuKvKernels& kernels) {
  avx512::FillKvKernels(kernels);
  kernels.prefill_rows = PrefillRows;
}

}  // namespace turbomind::amx
