#pragma once

// ⑥ Times the kernels of linear layers on the real weights, and sets the choices of a CudaLinear.

#include <vector>

#include "turbomind/backend/cuda/linear/linear_ops.h"
#include "turbomind/backend/cuda/tuner/tuner.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

// Choose kernels for all stacks of the layers and all ranges of their rows: few rows and large
// matrices first. Each measurement is a graph of several calls, which cycle through the layers of
// one shape, as steps do. A kernel whose results differ from those of the table's is wrong: it is
// not used.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used. The memory that the
// calls need is free again at the end.
void TuneLinear(const Context& ctx, CudaLinear& linear, const std::vector<LayerToTune>& layers,
                Tuner& tuner);

}  // namespace turbomind::cuda
