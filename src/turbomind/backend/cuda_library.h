#pragma once

// The interface of libturbomind_cuda.so, which the engine loads if it exists. The library has one
// function:
//
//   extern "C" const turbomind::CudaLibrary* turbomind_cuda_library();
//
// The engine uses Device objects of the library, so both must be built from the same headers with
// the same C++ ABI. The stamp checks this. Any thread may call, one at a time.

#include <cstdint>
#include <string>
#include <vector>

#include "turbomind/backend/row_transfer.h"
#include "turbomind/core/device_capability.h"

namespace turbomind {

class Device;

// Returns the capability of a GPU with the compute capability `sm`, e.g. 90. A GPU reads all
// weights again for each piece of a step, so its pieces are large.
inline DeviceCapability CudaCapability(int sm) {
  // Flattened prefixes, 16-bit copies of activations, cuBLASLt's workspace, and recorded steps.
  constexpr int64_t kWorkspaceBytes = int64_t{512} << 20;
  return {.is_cuda = true,
          .sm = sm,
          .generation = "SM " + std::to_string(sm),
          .default_batch_size = 128,
          .default_step_tokens = 8192,
          .step_cost_tokens = 128,
          .max_logit_rows = 128,
          .ffn_rows = 2048,
          .reserves_lazily = false,
          .workspace_bytes = kWorkspaceBytes,
          .limits_pools_to_batch = false,
          .reads_mapped_files = false,
          .has_fp32 = false,
          .has_all_formats = true,
          .has_fp8_weights = true,
          .has_recurrent_layers = true,
          .collects_kv_statistics = false,
          // Drafts have not run on a GPU, and a step with a draft is not recorded as a graph.
          .drafts_by_default = false};
}

struct CudaDeviceInfo {
  std::string name;
  DeviceCapability capability;
  int64_t memory_bytes = 0;
};

// Options of a device.
struct CudaDeviceOptions {
  bool deterministic = false;  // rows of the results do not depend on the batch
  // Round the activations of FP8 weights to 8 bits where the library multiplies both. No GPU has
  // run it. Without effect if `deterministic`.
  bool fp8_activations = false;
  int num_threads = 1;  // host threads that pack weights and sample rows
  // cuBLASLt: names for dlopen, tried in this order before the default locations
  // (backend/cuda/linear/cublas_lt.h).
  std::vector<std::string> cublas_lt = {};
  // Identifies the library's kernels in TuningResult::machine. The library sets it.
  std::string kernels = {};
};

inline constexpr char kCudaLibrarySymbol[] = "turbomind_cuda_library";

// Functions throw nothing. On failure, `why` gives the reason in one line.
struct CudaLibrary {
  // CudaStamp() of its build. It is the first member in every version: if it differs, no other
  // member may be read.
  const char* stamp;
  // Empty if there is no GPU, or no driver for it.
  void (*list)(std::vector<CudaDeviceInfo>* gpus, std::string* why) noexcept;
  // The caller deletes the device. Null on failure.
  Device* (*make_device)(int gpu, const CudaDeviceOptions& options, std::string* why) noexcept;
  // Queue a transfer on a cudaStream_t and return before it has run; null is the default stream.
  // All memory, that of tables and scales too, is accessible to the GPU that has the cache. Several
  // threads may call at once. Rows with a bad slot, entry, length or scale are left as they were.
  TransferResult (*write_rows)(const RowWrite& write, void* stream) noexcept;
  TransferResult (*gather_rows)(const RowGather& gather, void* stream) noexcept;
  // Let the later work of a stream wait for the work that another one has.
  TransferResult (*wait_stream)(void* stream, void* other) noexcept;
};

using GetCudaLibrary = const CudaLibrary* (*)();

// Stamp suffix of a library that runs kernels on the CPU (tests/cpp/cuda_shim), so that it is never
// mistaken for one that uses a GPU.
#define TM_SHIM_SUFFIX " shim"

#if defined(_LIBCPP_VERSION)
#define TM_STANDARD_LIBRARY "libc++"
#elif defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
#define TM_STANDARD_LIBRARY "libstdc++"
#else
#define TM_STANDARD_LIBRARY "other"
#endif

}  // namespace turbomind
