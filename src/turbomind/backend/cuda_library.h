#pragma once

// What libturbomind_cuda.so hands to the engine, which runs without it: its one function is
//
//   extern "C" const turbomind::CudaLibrary* turbomind_cuda_library();
//
// The engine then uses Device objects of the library, so both are built from the same headers by
// the same rules of C++; the stamp says so. Any thread may call, one at a time.

#include <cstdint>
#include <string>
#include <vector>

namespace turbomind {

class Device;

struct CudaDeviceInfo {
  std::string name;
  int sm = 0;  // compute capability, e.g. 90
  int64_t memory_bytes = 0;
};

// How a device is to be.
struct CudaDeviceOptions {
  bool deterministic = false;  // rows of the results do not depend on the batch
  int num_threads = 1;         // of the host: weights are packed and rows sampled on them
  // cuBLASLt: what dlopen takes, to be tried in this order before the places that the library knows
  // itself (backend/cuda/linear/cublas_lt.h).
  std::vector<std::string> cublas_lt = {};
};

inline constexpr char kCudaLibrarySymbol[] = "turbomind_cuda_library";

// Nothing is thrown: where a function fails, `why` says why, in one line.
struct CudaLibrary {
  // CudaStamp() of its build, first in every version: with another one nothing else may be read.
  const char* stamp;
  // Empty where there is no GPU, or no driver for it.
  void (*list)(std::vector<CudaDeviceInfo>* gpus, std::string* why) noexcept;
  int64_t (*free_bytes)(int gpu, std::string* why) noexcept;  // -1: failed
  // The caller's to delete. Null: failed.
  Device* (*make_device)(int gpu, const CudaDeviceOptions& options, std::string* why) noexcept;
};

using GetCudaLibrary = const CudaLibrary* (*)();

// What a library that runs kernels on the CPU (tests/cpp/cuda_shim) adds to the stamp, so that it
// is never taken for one with a GPU.
#define TM_SHIM_SUFFIX " shim"

#if defined(_LIBCPP_VERSION)
#define TM_STANDARD_LIBRARY "libc++"
#elif defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
#define TM_STANDARD_LIBRARY "libstdc++"
#else
#define TM_STANDARD_LIBRARY "other"
#endif

}  // namespace turbomind
