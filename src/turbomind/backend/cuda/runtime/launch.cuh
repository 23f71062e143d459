#pragma once

// Launch(Kernel<...>, shape, stream, params) runs a kernel from the host. A kernel takes one struct
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

// Allow the kernel `shared_bytes` of shared memory and queue it on the stream. A grid with no
// blocks is skipped. Throws InternalError with the driver's message.
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
