// The function that the library exports; see backend/cuda_library.h.

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/linear/cublas_lt.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/backend/cuda/runtime/used_gpu.h"
#include "turbomind/backend/cuda/transfer/row_transfer.h"
#include "turbomind/backend/cuda_library.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

#if defined(__CUDACC__)
constexpr char kStamp[] = TM_CUDA_STAMP " " TM_STANDARD_LIBRARY;
#else
constexpr char kStamp[] = TM_CUDA_STAMP " " TM_STANDARD_LIBRARY TM_SHIM_SUFFIX;
#endif

// Return the result of `run`. If it throws, write the reason into `why` and return `failed`.
template <class Result, class F>
Result Guarded(std::string* why, Result failed, const F& run) noexcept {
  try {
    return run();
  } catch (const OutOfMemory& error) {
    *why = error.what();
  } catch (const std::bad_alloc&) {
    *why = "not enough host memory";
  } catch (const std::exception& error) {
    *why = error.what();
  } catch (...) {
    *why = "an unknown error";
  }
  return failed;
}

void List(std::vector<CudaDeviceInfo>* gpus, std::string* why) noexcept {
  gpus->clear();
  Guarded(why, 0, [&] {
    const int count = NumGpus(why);
    for (int gpu = 0; gpu < count; ++gpu) {
      const GpuProperties properties = PropertiesOf(gpu);
      gpus->push_back({.name = properties.name,
                       .capability = CudaCapability(properties.sm),
                       .memory_bytes = static_cast<int64_t>(properties.memory_bytes)});
    }
    return count;
  });
}

struct ProbeParams {
  int32_t* out;
};

__global__ void Probe(ProbeParams params) {
  BeginKernel();
  if (ThreadIndexX() == 0) {
    StoreGlobal(params.out, int32_t{1});
  }
}

// Throw InvalidArgument if the kernels of this build do not run on the GPU.
void RequireKernels(int gpu) {
  UseGpu(gpu);
  const std::unique_ptr<CUstream_st, void (*)(Stream)> stream(CreateStream(), DestroyStream);
  const std::unique_ptr<void, void (*)(void*)> memory(AllocateGpu(sizeof(int32_t)), FreeGpu);
  try {
    Launch(Probe, {}, stream.get(), ProbeParams{static_cast<int32_t*>(memory.get())});
  } catch (const InternalError& error) {
    throw InvalidArgument("SM " + std::to_string(PropertiesOf(gpu).sm) +
                          " is not supported. The library was built for " + TM_CUDA_ARCHS +
                          " (TM_CUDA_ARCHS): " + error.what());
  }
  Synchronize(stream.get());
}

// Return the candidates for cuBLASLt. The shim loads only a library named by the environment
// variable, because the real cuBLASLt cannot access the shim's memory.
std::vector<std::string> CublasLtLibraries(const CudaDeviceOptions& options) {
  if (const char* named = std::getenv("LMDEPLOY_CUBLASLT_LIBRARY"); named != nullptr && *named) {
    return {named};
  }
  std::vector<std::string> libraries;
#if defined(__CUDACC__)
  libraries = options.cublas_lt;
  for (std::string& place : CublasLt::UsualPlaces()) {
    libraries.push_back(std::move(place));
  }
#else
  static_cast<void>(options);
#endif
  return libraries;
}

Device* Make(int gpu, const CudaDeviceOptions& options, std::string* why) noexcept {
  return Guarded(why, static_cast<Device*>(nullptr), [&] {
    CudaDeviceOptions resolved = options;
    resolved.cublas_lt = CublasLtLibraries(options);
    resolved.kernels = TM_CUDA_KERNELS;
    const UsedGpu used(gpu);  // the caller's current GPU stays the same
    RequireKernels(gpu);      // before the device, which may launch kernels when it is made
    return MakeDevice(gpu, resolved).release();
  });
}

template <class F>
TransferResult Transfer(const F& run) noexcept {
  std::string ignored;
  return Guarded(&ignored, TransferResult::kFailed, run);
}

TransferResult Write(const RowWrite& write, void* stream) noexcept {
  return Transfer([&] { return QueueWrite(write, static_cast<Stream>(stream)); });
}

TransferResult Gather(const RowGather& gather, void* stream) noexcept {
  return Transfer([&] { return QueueGather(gather, static_cast<Stream>(stream)); });
}

TransferResult Wait(void* stream, void* other) noexcept {
  return Transfer([&] {
    WaitForStream(static_cast<Stream>(stream), static_cast<Stream>(other));
    return TransferResult::kQueued;
  });
}

constexpr CudaLibrary kLibrary = {kStamp, List, Make, Write, Gather, Wait};

}  // namespace
}  // namespace turbomind::cuda

extern "C" __attribute__((visibility("default"))) const turbomind::CudaLibrary*
turbomind_cuda_library() {
  return &turbomind::cuda::kLibrary;
}
