#pragma once

// ⑥ y = x · wᵀ by WideKernel (linear_wide.cuh): the host side.

#include <cstdint>

#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Return whether the GPU has products of warp groups and this build has code for them. Runs a
// kernel.
bool ProbeWarpGroups(Stream stream);

// Counters in GPU memory that WideKernel leaves at zero.
class WideCounters {
 public:
  WideCounters() = default;
  ~WideCounters();
  WideCounters(const WideCounters&) = delete;
  WideCounters& operator=(const WideCounters&) = delete;

  // Return counters for the largest grid of a GPU. Graphs use them, so they never move. The first
  // call allocates and must not be part of a graph.
  int32_t* Get(const Context& ctx);

 private:
  int32_t* memory_ = nullptr;
};

// Multiply, and store y, or only the activation of it if gate.out is set (GroupedGateParams).
// REQUIRES: ctx.has_warp_groups; weights are not FP32. x may have any alignment.
void RunWide(const Context& ctx, MatrixFormat stored, const LinearKernelParams& params,
             const GatedActivationParams& gate, WideCounters& counters);

}  // namespace turbomind::cuda
