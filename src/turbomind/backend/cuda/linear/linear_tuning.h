#pragma once

// ⑥ Times the kernels of linear layers on the real weights, and sets the choices of a CudaLinear.

#include <string>

#include "turbomind/backend/cuda/linear/linear_ops.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

// How TuneLinear measures. `time` returns the microseconds that `work` takes on ctx.stream.
struct LinearClock {
  FunctionRef<double(const std::string& question, LinearKernel kernel, FunctionRef<void()> work)>
      time;
  FunctionRef<double()> seconds;  // since some fixed time
};

// Choose kernels for all stacks of the layers and all ranges of their rows: few rows and large
// matrices first. Each measurement is a graph of several calls, which cycle through the layers of
// one shape, as steps do. Sets everything of the result but `machine`.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used. The memory that the
// calls need is free again at the end.
TuningResult TuneLinear(const Context& ctx, CudaLinear& linear, const TuningParams& params,
                        const LinearClock& clock);

}  // namespace turbomind::cuda
