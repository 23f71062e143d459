#pragma once

// ⑦ Attention over latents on a GPU.

#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/latent_params.h"

namespace turbomind::cuda {

// Throws InvalidArgument for a layer that the kernels do not support.
void RequireLatentKernels(const KvLayerView& layer);

// Attention of all sequences of a batch: Device::LatentAttention. Addresses are on the GPU, except
// those of `host`, the same batch on the host. q, q_rotary and out are 16-byte aligned, and so are
// their strides. REQUIRES: the planner has uploaded the step, unless the context is deterministic.
//
// Sequences with one token use the planner's items, whose number does not depend on their
// positions, so that the launches can be recorded. All others, and every sequence of a
// deterministic device, are cut into equal parts, or into one.
//
// Matrix products have 16-bit operands and FP32 sums, whatever params.exact says: BF16 if the whole
// layer is stored so, FP16 otherwise.
void CudaLatentAttention(const Context& context, const DecodePlanner& planner,
                         const LatentAttentionParams& params, const BatchView& host);

}  // namespace turbomind::cuda
