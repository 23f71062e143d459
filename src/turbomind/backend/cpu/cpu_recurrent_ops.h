#pragma once

// ⑥⑦ The ops of recurrent layers of the CPU device. They split the work into items of the thread
// pool and call the kernels of one instruction set. The split never changes a bit of the result.
// The arguments are already checked (ops/recurrent.h).

#include "turbomind/backend/cpu/recurrent_kernels.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/checkpoint_params.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {

void CpuShortConvolution(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                         const ShortConvolutionParams& params);
void CpuGatedDelta(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                   const GatedDeltaParams& params);
void CpuSelectiveScan(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                      const SelectiveScanParams& params);
void CpuSaveCheckpoints(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                        const StateCopyParams& params);
void CpuRestoreCheckpoints(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                           const StateCopyParams& params);

}  // namespace turbomind
