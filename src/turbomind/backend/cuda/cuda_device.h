#pragma once

// A GPU as the engine's device.

#include <memory>

#include "turbomind/backend/cuda_library.h"
#include "turbomind/ops/device.h"

namespace turbomind::cuda {

// Throws InvalidArgument for a GPU that is not there or too old, InternalError with the driver's
// words. Where nothing of options.cublas_lt can be loaded, and with `deterministic`, products are
// our own kernels'.
std::unique_ptr<Device> MakeDevice(int gpu, const CudaDeviceOptions& options);

}  // namespace turbomind::cuda
