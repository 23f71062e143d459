#pragma once

// ⑦ The attention kernels of one instruction set, for FillKvKernels.

#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

void DecodeSplits(const DecodeSplitsArgs& args);
void MergeSplits(const MergeSplitsArgs& args);
void PrefillRows(const PrefillRowsArgs& args);
void LatentSplits(const LatentSplitsArgs& args);
void LatentMerge(const LatentMergeArgs& args);
void LatentOutput(const LatentOutputArgs& args);
#if defined(TM_ISA_amx)
void PrefillRowsBf16(const PrefillRowsArgs& args);  // FillBf16KvKernels
#endif

}  // namespace turbomind::TM_ISA
