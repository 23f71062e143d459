#pragma once

// ⑥⑦ The ops of latents of the CPU device, as cpu_kv_ops.h describes.

#include "turbomind/backend/cpu/cpu_kv_ops.h"

namespace turbomind {

void CpuWriteLatents(const CpuKvKernels& kernels, ThreadPool& pool,
                     const WriteLatentsParams& params);
void CpuLatentAttention(const CpuKvKernels& kernels, ThreadPool& pool, CpuKvScratch& memory,
                        const LatentAttentionParams& params);

}  // namespace turbomind
