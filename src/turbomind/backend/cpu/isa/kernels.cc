// The tables of all kernels of one instruction set.

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/dense/dense.h"
#include "turbomind/backend/cpu/isa/linear/linear.h"
#include "turbomind/backend/cpu/isa/recurrent/recurrent.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {
RowCounts WriteHead(const WriteHeadArgs& args);
RowCounts WriteLatent(const WriteLatentArgs& args);

void FillDenseKernels(CpuDenseKernels& kernels) {
  kernels.linear = {.pack_panel = PackPanel,
                    .plan_panels = PlanPanels,
                    .multiply = Multiply,
                    .scratch_bytes = MultiplyScratchBytes};
  kernels.norm = NormRow;
  kernels.soft_cap = SoftCapRange;
  kernels.gated_activation = GatedActivationRow;
  kernels.gated_norm = GatedNormRow;
  kernels.sigmoid_gate = SigmoidGateRange;
}

void FillKvKernels(CpuKvKernels& kernels) {
  FillRowKernels(kernels);
  kernels.decode_splits = DecodeSplits;
  kernels.merge_splits = MergeSplits;
  kernels.prefill_rows = PrefillRows;
  kernels.write_head = WriteHead;
  kernels.latent_splits = LatentSplits;
  kernels.latent_merge = LatentMerge;
  kernels.latent_output = LatentOutput;
  kernels.write_latent = WriteLatent;
}

void FillRecurrentKernels(CpuRecurrentKernels& kernels) {
  kernels.short_convolution = ShortConvolutionRun;
  kernels.gated_delta = GatedDeltaRun;
  kernels.selective_scan = SelectiveScanRun;
  kernels.encode_state = EncodeStateRows;
  kernels.decode_state = DecodeStateRows;
}

}  // namespace turbomind::TM_ISA
