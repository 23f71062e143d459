#pragma once

// backend/cuda/runtime/launch.cuh for the CPU.

#include <functional>

#include "cuda_shim/shim.h"

namespace turbomind::cuda {

struct LaunchShape;

// Runs the kernel now, or whenever its graph runs.
void RunOnShim(const LaunchShape& shape, Stream stream, std::function<void()> kernel);

template <class Params>
void Launch(void (*kernel)(Params), const LaunchShape& shape, Stream stream, Params params) {
  RunOnShim(shape, stream, [kernel, params] { kernel(params); });
}

}  // namespace turbomind::cuda
