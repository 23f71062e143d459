#pragma once

// How the host runs a kernel: Launch(Kernel<...>, shape, stream, params). A kernel takes one struct
// of plain data.

#include <cstddef>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

inline constexpr int64_t kMaxGridY = 65535;  // and in z

struct LaunchShape {
  int64_t grid_x = 1;
  int64_t grid_y = 1;
  int64_t grid_z = 1;
  int threads = 32;
  size_t shared_bytes = 0;
};

// Allows the kernel `shared_bytes` and runs it in the order of the stream; a grid of no blocks is
// nothing. Throws InternalError with the driver's words.
void LaunchKernel(const void* kernel, const LaunchShape& shape, Stream stream, void** arguments);

}  // namespace turbomind::cuda

#if !defined(__CUDACC__)
#include "cuda_shim/launch.h"
#else

namespace turbomind::cuda {

template <class Params>
void Launch(void (*kernel)(Params), const LaunchShape& shape, Stream stream, Params params) {
  void* arguments[] = {&params};
  LaunchKernel(reinterpret_cast<const void*>(kernel), shape, stream, arguments);
}

}  // namespace turbomind::cuda

#endif
