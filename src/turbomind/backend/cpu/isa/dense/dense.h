#pragma once

// Row kernels of one instruction set; see dense_kernels.h for the arguments.

#include "turbomind/backend/cpu/dense_kernels.h"

namespace turbomind::TM_ISA {

void RmsNormRow(const float* x, const float* weight, float eps, int dim, float* out);
void GatedActivationRow(const GatedActivationParams& params, int64_t row);

}  // namespace turbomind::TM_ISA
