#pragma once

// Kernels of recurrent layers of one instruction set; see recurrent_kernels.h for the arguments.

#include "turbomind/backend/cpu/recurrent_kernels.h"

namespace turbomind::TM_ISA {

void ShortConvolutionRun(const ShortConvolutionParams& params, const SequenceStep& step,
                         const ChannelRun& run);
void GatedDeltaRun(const GatedDeltaParams& params, const SequenceStep& step, const ColumnRun& run);
void SelectiveScanRun(const SelectiveScanParams& params, const SequenceStep& step,
                      const ColumnRun& run);
void EncodeStateRows(const StateRows& rows);
void DecodeStateRows(const StateRows& rows);

}  // namespace turbomind::TM_ISA
