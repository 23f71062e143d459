#pragma once

// The dense ops of the CPU device, except for linear layers (cpu_linear.h). They check shapes,
// split the work into items of the thread pool and call the kernels of one instruction set. The
// split never changes a bit of the result.

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {

void CpuEmbed(ThreadPool& pool, const EmbedParams& params);
void CpuNorm(const CpuDenseKernels& kernels, ThreadPool& pool, const NormParams& params);
void CpuAdd(ThreadPool& pool, const AddParams& params);
void CpuSoftCap(const CpuDenseKernels& kernels, ThreadPool& pool, const SoftCapParams& params);
void CpuGatedActivation(const CpuDenseKernels& kernels, ThreadPool& pool,
                        const GatedActivationParams& params);
void CpuGatedNorm(const CpuDenseKernels& kernels, ThreadPool& pool, const GatedNormParams& params);
void CpuSigmoidGate(const CpuDenseKernels& kernels, ThreadPool& pool,
                    const SigmoidGateParams& params);
void CpuRouteExperts(ThreadPool& pool, const RouteExpertsParams& params);
void CpuGroupRows(const GroupRowsParams& params);
void CpuCombineExperts(ThreadPool& pool, const CombineExpertsParams& params);

}  // namespace turbomind
