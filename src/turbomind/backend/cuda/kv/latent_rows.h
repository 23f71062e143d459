#pragma once

// ⑥⑦ Launchers for the rows of latents, as in kv_ops.h. REQUIRES: a cache dtype of 16 bits; rank
// and rotary_dim are multiples of 16, at most kMaxLatentDim. rows and q are 16-byte aligned.

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/latent_params.h"

namespace turbomind::cuda {

// Bit-identical to the CPU, except for which NaN a sum gives. A token whose block id is -1 is
// neither stored nor counted.
void CudaWriteLatents(const Context& context, const WriteLatentsParams& params);
// CudaQuantizeBlocks and CudaFlattenKV for layers with latents.
void CudaQuantizeLatents(const Context& context, const QuantizeBlocksParams& params);
void CudaFlattenLatents(const Context& context, const FlattenKVParams& params);

}  // namespace turbomind::cuda
