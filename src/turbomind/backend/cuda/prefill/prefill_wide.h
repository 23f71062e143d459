#pragma once

// ⑦ Prefill attention by PrefillWideKernel (prefill_wide.cuh): the host side.

#include <cstdint>

#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"
#include "turbomind/backend/cuda/runtime/context.h"

namespace turbomind::cuda {

// Return the number of blocks that the launch would have, or 0 if the kernel cannot run it: without
// products of warp groups, for other head_dims than 64, 96, 128 and 256, with split positions, or
// if rows must have the same bits for every chunking, because small chunks use the other kernel.
int64_t CountWideBlocks(const Context& context, int head_dim, const PrefillParams& params);

// Run it. REQUIRES: CountWideBlocks is not 0.
void RunPrefillWide(const Context& context, DataType type, int head_dim,
                    const PrefillParams& params);

}  // namespace turbomind::cuda
