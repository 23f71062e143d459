#pragma once

// ⑥⑦ The ops of recurrent layers on the GPU, as specified in ops/recurrent_params.h. All pointers
// are GPU addresses. Every sum has one fixed order, so a token's result depends neither on the
// batch nor on the cut of its sequence into steps.

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/checkpoint_params.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind::cuda {

void CudaShortConvolution(const Context& ctx, const ShortConvolutionParams& params);
void CudaGatedDelta(const Context& ctx, const GatedDeltaParams& params);
void CudaSelectiveScan(const Context& ctx, const SelectiveScanParams& params);
void CudaGatedNorm(const Context& ctx, const GatedNormParams& params);
void CudaSigmoidGate(const Context& ctx, const SigmoidGateParams& params);
void CudaSaveCheckpoints(const Context& ctx, const StateCopyParams& params);
void CudaRestoreCheckpoints(const Context& ctx, const StateCopyParams& params);

}  // namespace turbomind::cuda
