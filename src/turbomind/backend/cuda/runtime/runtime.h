#pragma once

// The driver functions that the CUDA backend's host code needs: memory, streams, events and graphs.
// The real implementation is runtime.cu. The tests' implementation (tests/cpp/cuda_shim/runtime.cc)
// runs on the CPU and checks that kernels touch only memory that was allocated here.
//
// Functions throw InternalError with the driver's message, or OutOfMemory. Functions that release
// something are noexcept, because destructors call them even after a kernel has failed. One thread
// at a time.

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
  int sm = 0;          // compute capability, e.g. 90
  std::string driver;  // its version, e.g. "580.159.04 (CUDA 13.0)"
  int num_sms = 0;
  size_t memory_bytes = 0;
  size_t shared_bytes_per_block = 0;  // with opt-in
  // Growth step of the workspace of context.h. If it is 0, the workspace has exactly the requested
  // size, so that tests detect every access beyond it.
  size_t workspace_step_bytes = 0;
  // Size of the allocations that matrices share, cuda_matrix.h. If it is 0, each matrix has its own
  // allocation, for the same reason.
  size_t matrix_piece_bytes = 0;
};

// Return 0 if there is no driver or no GPU, and write the reason into `why` unless it is null.
int NumGpus(std::string* why = nullptr);
GpuProperties PropertiesOf(int gpu);
// Make `gpu` the GPU of all later calls in this thread. A thread that never calls this uses the
// first GPU and allocates memory there.
void UseGpu(int gpu);
void UseGpuToFree(int gpu) noexcept;  // before memory is released
int CurrentGpu();

struct MemoryInfo {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};
MemoryInfo GpuMemory();
inline OutOfMemory GpuIsFull(size_t wanted_bytes, size_t free_bytes) {
  return OutOfMemory("GPU memory: " + std::to_string(wanted_bytes) +
                     " bytes are needed, but only " + std::to_string(free_bytes) +
                     " are free. Lower --cache-max-entry-count or --max-batch-size.");
}

void* AllocateGpu(size_t num_bytes);  // not cleared; 256-byte aligned
void FreeGpu(void* memory) noexcept;  // waits for work that uses it
// Return the GPU to which an address belongs. Does not wait for any GPU.
inline constexpr int kEveryGpu = -1;  // managed or pinned memory
inline constexpr int kNoGpu = -2;
int GpuOf(const void* address);
void* AllocatePinned(size_t num_bytes);  // host memory with fast copies
void FreePinned(void* memory) noexcept;

Stream CreateStream();
void DestroyStream(Stream stream) noexcept;
void Synchronize(Stream stream);
// Let the later work of `stream` wait for the work that `other` has. Either may be null, the
// default stream.
void WaitForStream(Stream stream, Stream other);
// Return how many blocks of a kernel an SM runs at once.
int BlocksPerSm(const void* kernel, int threads, size_t shared_bytes);
// Copy in the order of the stream. Both addresses may be on the host or the GPU. Host memory must
// stay valid until the stream is synchronized, because some GPUs read even unpinned memory
// directly.
void CopyBytes(void* to, const void* from, size_t num_bytes, Stream stream);
void ClearBytes(void* to, size_t num_bytes, Stream stream);

Event CreateEvent();
void DestroyEvent(Event event) noexcept;
void Record(Event event, Stream stream);
void WaitFor(Event event);
// An event that keeps its time. Both arguments of MicrosecondsBetween are such events, and have
// been waited for.
Event CreateTimedEvent();
double MicrosecondsBetween(Event begin, Event end);

// Let launches of the stream begin before the work before them has ended, from now on or no longer.
// The blocks of a launch then take the places that the one before leaves free, and wait there
// (WaitForPrevious in intrinsics.cuh). Without effect on GPUs before SM 90. Graphs keep what was
// set when they were recorded.
void OverlapLaunches(Stream stream, bool overlap);
bool LaunchesOverlap(Stream stream);

// Work queued on the stream between these two calls is recorded instead of run: kernels with their
// arguments and copies with their addresses.
void BeginCapture(Stream stream);
Graph EndCapture(Stream stream);
void LaunchGraph(Graph graph, Stream stream);
void DestroyGraph(Graph graph) noexcept;

}  // namespace turbomind::cuda
