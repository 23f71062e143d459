#pragma once

// Makes a Device that runs on a GPU.

#include <memory>

#include "turbomind/backend/cuda_library.h"
#include "turbomind/ops/device.h"

namespace turbomind::cuda {

// Throws InvalidArgument if the GPU does not exist or is too old, and InternalError with the
// driver's message. The backend's own kernels compute matrix products if `deterministic` is set or
// no entry of options.cublas_lt can be loaded.
std::unique_ptr<Device> MakeDevice(int gpu, const CudaDeviceOptions& options);

}  // namespace turbomind::cuda
