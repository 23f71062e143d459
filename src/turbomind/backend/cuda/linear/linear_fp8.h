#pragma once

// ⑥ y = x · wᵀ with 8-bit activations, by cuBLASLt.

#include "turbomind/backend/cuda/linear/cublas_lt.h"
#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/runtime/context.h"

namespace turbomind::cuda {

// Multiply as many segments as possible with the library's product of FP8. Return the others.
// Activations become E4M3 with a scale for each row, or for each 128 columns of a row if the
// weights have such scales. REQUIRES: IsFp8(stored), no experts.
LinearKernelParams RunFp8Library(const Context& ctx, const LinearKernelParams& params,
                                 MatrixFormat stored, CublasLt& library);

}  // namespace turbomind::cuda
