#pragma once

// Row kernels of one instruction set; see dense_kernels.h for the arguments.

#include "turbomind/backend/cpu/dense_kernels.h"

namespace turbomind::TM_ISA {

void NormRow(const NormParams& params, int64_t row);
void SoftCapRange(const SoftCapParams& params, int64_t begin, int64_t end);
void GatedActivationRow(const GatedActivationParams& params, int64_t row);
void GatedNormRow(const GatedNormParams& params, int64_t row);
void SigmoidGateRange(const SigmoidGateParams& params, int64_t begin, int64_t end);

}  // namespace turbomind::TM_ISA
