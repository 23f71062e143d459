#include <cuda_runtime.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <set>
#include <string>

#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {
namespace {

constexpr size_t kSharedByDefault = 48 << 10;
// These sizes suffice for most models and steps. The memory plan leaves twice as much
// (engine/memory_plan.cc).
constexpr size_t kWorkspaceStepBytes = size_t{256} << 20;
constexpr size_t kMatrixPieceBytes = size_t{64} << 20;

void Require(cudaError_t code, const char* what) {
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clear the error so that later calls do not report it
    throw OutOfMemory(std::string("There is too little GPU memory for ") + what +
                      ". Lower --cache-max-entry-count or --max-batch-size.");
  }
  if (code != cudaSuccess) {
    throw InternalError(std::string("CUDA: ") + what + ": " + cudaGetErrorString(code));
  }
}

int Attribute(cudaDeviceAttr attribute, int gpu) {
  int value = 0;
  Require(cudaDeviceGetAttribute(&value, attribute, gpu), "cudaDeviceGetAttribute");
  return value;
}

std::string TextOf(const LaunchShape& shape) {
  return "a launch of " + std::to_string(shape.grid_x) + " x " + std::to_string(shape.grid_y) +
         " x " + std::to_string(shape.grid_z) + " blocks of " + std::to_string(shape.threads) +
         " threads and " + std::to_string(shape.shared_bytes) + " bytes of shared memory";
}

std::string TextOfVersion(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Return the version of the kernel module, if Linux shows it, and the newest CUDA that it supports.
std::string DriverVersion() {
  int cuda = 0;
  cudaDriverGetVersion(&cuda);
  std::string module;
  std::ifstream("/sys/module/nvidia/version") >> module;
  return (module.empty() ? "" : module + " ") + "(CUDA " + TextOfVersion(cuda) + ")";
}

// The streams with overlapping launches. libkvx launches in threads of its callers.
struct OverlappedStreams {
  std::mutex mutex;
  std::set<Stream> streams;
};
OverlappedStreams& TheOverlappedStreams() {
  static OverlappedStreams streams;
  return streams;
}

// Return the reason why no GPU was found.
std::string WhyNone(cudaError_t code) {
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) {
    return "no NVIDIA driver found";
  }
  if (code == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver supports CUDA " + TextOfVersion(driver) + ", but CUDA " +
           TextOfVersion(runtime) + " or newer is required; update the driver";
  }
  if (code == cudaSuccess || code == cudaErrorNoDevice) {
    return "no GPU found; CUDA_VISIBLE_DEVICES may hide some";
  }
  return cudaGetErrorString(code);
}

}  // namespace

int NumGpus(std::string* why) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    cudaGetLastError();
    count = 0;
  }
  if (count == 0 && why != nullptr) {
    *why = WhyNone(code);
  }
  return count;
}

GpuProperties PropertiesOf(int gpu) {
  cudaDeviceProp all;
  Require(cudaGetDeviceProperties(&all, gpu), "cudaGetDeviceProperties");
  return {.name = all.name,
          .sm = all.major * 10 + all.minor,
          .driver = DriverVersion(),
          .num_sms = all.multiProcessorCount,
          .memory_bytes = all.totalGlobalMem,
          .shared_bytes_per_block =
              static_cast<size_t>(Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu)),
          .workspace_step_bytes = kWorkspaceStepBytes,
          .matrix_piece_bytes = kMatrixPieceBytes};
}

void UseGpu(int gpu) { Require(cudaSetDevice(gpu), "cudaSetDevice"); }

void UseGpuToFree(int gpu) noexcept { cudaSetDevice(gpu); }

int CurrentGpu() {
  int gpu = 0;
  Require(cudaGetDevice(&gpu), "cudaGetDevice");
  return gpu;
}

MemoryInfo GpuMemory() {
  MemoryInfo info;
  Require(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "cudaMemGetInfo");
  return info;
}

void* AllocateGpu(size_t num_bytes) {
  void* memory = nullptr;
  const cudaError_t code = cudaMalloc(&memory, std::max<size_t>(num_bytes, 1));
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clear the error so that later calls do not report it
    throw GpuIsFull(num_bytes, GpuMemory().free_bytes);
  }
  Require(code, "cudaMalloc");
  return memory;
}

void FreeGpu(void* memory) noexcept { cudaFree(memory); }

int GpuOf(const void* address) {
  cudaPointerAttributes attributes;
  Require(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
  if (attributes.devicePointer == nullptr) {
    return kNoGpu;
  }
  return attributes.type == cudaMemoryTypeDevice ? attributes.device : kEveryGpu;
}

void* AllocatePinned(size_t num_bytes) {
  void* memory = nullptr;
  const cudaError_t code = cudaMallocHost(&memory, num_bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw OutOfMemory("Allocating " + std::to_string(num_bytes) +
                      " bytes of pinned host memory failed. Lower --max-batch-size.");
  }
  Require(code, "cudaMallocHost");
  return memory;
}

void FreePinned(void* memory) noexcept { cudaFreeHost(memory); }

Stream CreateStream() {
  cudaStream_t stream = nullptr;
  Require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

void DestroyStream(Stream stream) noexcept {
  OverlapLaunches(stream, false);
  cudaStreamDestroy(stream);
}

void Synchronize(Stream stream) {
  Require(cudaStreamSynchronize(stream), "waiting for kernels and copies");
}

void WaitForStream(Stream stream, Stream other) {
  const Event event = CreateEvent();
  const cudaError_t recorded = cudaEventRecord(event, other);
  const cudaError_t code =
      recorded == cudaSuccess ? cudaStreamWaitEvent(stream, event, 0) : recorded;
  DestroyEvent(event);  // once it has been reached
  Require(code, "waiting for another stream");
}

void CopyBytes(void* to, const void* from, size_t num_bytes, Stream stream) {
  if (num_bytes > 0) {
    const cudaError_t code = cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream);
    if (code != cudaSuccess) {
      Require(code, ("a copy of " + std::to_string(num_bytes) + " bytes").c_str());
    }
  }
}

void ClearBytes(void* to, size_t num_bytes, Stream stream) {
  if (num_bytes > 0) {
    Require(cudaMemsetAsync(to, 0, num_bytes, stream), "clearing memory");
  }
}

Event CreateEvent() {
  cudaEvent_t event = nullptr;
  Require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

Event CreateTimedEvent() {
  cudaEvent_t event = nullptr;
  Require(cudaEventCreate(&event), "cudaEventCreate");
  return event;
}

double MicrosecondsBetween(Event begin, Event end) {
  float milliseconds = 0.f;
  Require(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  return 1e3 * double{milliseconds};
}

void DestroyEvent(Event event) noexcept { cudaEventDestroy(event); }

void Record(Event event, Stream stream) {
  Require(cudaEventRecord(event, stream), "cudaEventRecord");
}

void WaitFor(Event event) { Require(cudaEventSynchronize(event), "cudaEventSynchronize"); }

void BeginCapture(Stream stream) {
  Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
          "beginning a graph capture");
}

Graph EndCapture(Stream stream) {
  cudaGraph_t graph = nullptr;
  Require(cudaStreamEndCapture(stream, &graph), "ending a graph capture");
  cudaGraphExec_t runnable = nullptr;
  const cudaError_t code = cudaGraphInstantiate(&runnable, graph, 0);
  cudaGraphDestroy(graph);
  Require(code, "cudaGraphInstantiate");
  return runnable;
}

void LaunchGraph(Graph graph, Stream stream) {
  Require(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
}

void DestroyGraph(Graph graph) noexcept { cudaGraphExecDestroy(graph); }

void OverlapLaunches(Stream stream, bool overlap) {
  OverlappedStreams& all = TheOverlappedStreams();
  const std::lock_guard lock(all.mutex);
  if (overlap) {
    all.streams.insert(stream);
  } else {
    all.streams.erase(stream);
  }
}

bool LaunchesOverlap(Stream stream) {
  OverlappedStreams& all = TheOverlappedStreams();
  const std::lock_guard lock(all.mutex);
  return all.streams.contains(stream);
}

namespace {

void AllowShared(const void* kernel, size_t shared_bytes) {
  if (shared_bytes > kSharedByDefault) {
    Require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes)),
            "setting the shared memory of a kernel");
  }
}

}  // namespace

int BlocksPerSm(const void* kernel, int threads, size_t shared_bytes) {
  AllowShared(kernel, shared_bytes);
  int count = 0;
  Require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes),
          "counting the blocks of an SM");
  return count;
}

void LaunchKernel(const void* kernel, const LaunchShape& shape, Stream stream, void** arguments) {
  if (shape.grid_x == 0 || shape.grid_y == 0 || shape.grid_z == 0) {
    return;
  }
  AllowShared(kernel, shape.shared_bytes);
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y),
                        static_cast<unsigned>(shape.grid_z));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = LaunchesOverlap(stream) ? 1 : 0;
  const cudaError_t code = cudaLaunchKernelExC(&config, kernel, arguments);
  if (code != cudaSuccess) {
    Require(code, TextOf(shape).c_str());
  }
}

}  // namespace turbomind::cuda
