#pragma once

// What the CUDA backend's host code asks of the driver: memory, streams, events, graphs. The real
// one is runtime.cu; the tests' own (tests/cpp/cuda_shim/runtime.cc) runs on the CPU and checks
// that kernels touch nothing but what was allocated here. Every function throws InternalError with
// the driver's words, or OutOfMemory, but those that give something back: destructors call them,
// even after a kernel has failed. One thread at a time.

#include <cstddef>
#include <string>

#include "turbomind/core/check.h"

struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;

namespace turbomind::cuda {

using Stream = CUstream_st*;
using Event = CUevent_st*;
using Graph = CUgraphExec_st*;

struct GpuProperties {
  std::string name;
  int sm = 0;  // compute capability, e.g. 90
  int num_sms = 0;
  size_t memory_bytes = 0;
  size_t shared_bytes_per_block = 0;  // with opt-in
  // Of the memory that one op uses at a time, context.h. 0: as much as asked for, so that tests see
  // every access beyond it.
  size_t workspace_step_bytes = 0;
  // Of the memory that matrices share, cuda_matrix.h. 0: each has its own, for the same reason.
  size_t matrix_piece_bytes = 0;
};

// 0 where there is no driver or no GPU; then `why`, if given, says which.
int NumGpus(std::string* why = nullptr);
GpuProperties PropertiesOf(int gpu);
// All that follows in this thread is about this GPU. A thread that says nothing means the first one
// and takes memory there.
void UseGpu(int gpu);
void UseGpuToFree(int gpu) noexcept;  // for what is given back
int CurrentGpu();

struct MemoryInfo {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};
MemoryInfo GpuMemory();
inline OutOfMemory GpuIsFull(size_t wanted_bytes, size_t free_bytes) {
  return OutOfMemory("GPU memory: " + std::to_string(wanted_bytes) + " bytes wanted, " +
                     std::to_string(free_bytes) +
                     " free; lower --cache-max-entry-count or --max-batch-size");
}

void* AllocateGpu(size_t num_bytes);     // not cleared; 256-byte aligned
void FreeGpu(void* memory) noexcept;     // waits for the work that uses it
void* AllocatePinned(size_t num_bytes);  // host memory that copies fast
void FreePinned(void* memory) noexcept;

Stream CreateStream();
void DestroyStream(Stream stream) noexcept;
void Synchronize(Stream stream);
// In the order of the stream. Either address on the host or the GPU; what lies on the host stays
// until the stream is waited for: some GPUs read memory that is not pinned by themselves.
void CopyBytes(void* to, const void* from, size_t num_bytes, Stream stream);
void ClearBytes(void* to, size_t num_bytes, Stream stream);

Event CreateEvent();
void DestroyEvent(Event event) noexcept;
void Record(Event event, Stream stream);
void WaitFor(Event event);

// What the stream is given between the two is recorded, not run: kernels with their arguments,
// copies with their addresses.
void BeginCapture(Stream stream);
Graph EndCapture(Stream stream);
void LaunchGraph(Graph graph, Stream stream);
void DestroyGraph(Graph graph) noexcept;

}  // namespace turbomind::cuda
