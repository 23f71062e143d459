#include "kvx/tests/device_memory.h"

#include "turbomind/backend/cuda/runtime/runtime.h"

// The stand-in exports the functions, because only it knows the memory of its kernels.
#pragma GCC visibility push(default)

namespace cuda = turbomind::cuda;

void* kvx_test_allocate(size_t num_bytes) { return cuda::AllocateGpu(num_bytes); }

void kvx_test_free(void* memory) { cuda::FreeGpu(memory); }

void kvx_test_copy(void* to, const void* from, size_t num_bytes, void* stream) {
  cuda::CopyBytes(to, from, num_bytes, static_cast<cuda::Stream>(stream));
  cuda::Synchronize(static_cast<cuda::Stream>(stream));
}

void* kvx_test_make_stream() { return cuda::CreateStream(); }

void kvx_test_free_stream(void* stream) { cuda::DestroyStream(static_cast<cuda::Stream>(stream)); }

#pragma GCC visibility pop
