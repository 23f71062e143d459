#pragma once

// A GPU with only the linear layers of backend/cuda. TM_CUBLAS_LT names the library to load.

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "turbomind/backend/cuda/linear/cuda_matrix.h"
#include "turbomind/backend/cuda/linear/linear_ops.h"

namespace turbomind::cuda {

struct Gpu {
  explicit Gpu(std::unique_ptr<CublasLt> library = nullptr, size_t piece_bytes = 0)
      : stream(CreateStream()),
        workspace(stream),
        pool(2),
        uploader(stream, pool),
        memory(piece_bytes),
        linear(std::move(library)) {
    ctx.stream = stream;
    ctx.gpu = PropertiesOf(0);
    ctx.gpu.num_sms = 2;  // one block of rows and outputs gets separate slices, more blocks do not
    ctx.workspace = &workspace;
  }
  Stream stream;
  Workspace workspace;
  ThreadPool pool;
  Uploader uploader;
  MatrixMemory memory;
  CudaLinear linear;
  Context ctx;
};

// Return null if a machine with a GPU has no cuBLASLt. Without a GPU, the stand-in is a file that
// always exists.
inline std::unique_ptr<CublasLt> Library() {
  std::string why;
  std::unique_ptr<CublasLt> library = CublasLt::Load({TM_CUBLAS_LT}, &why);
  if (library == nullptr) {
    constexpr std::string_view kName = TM_CUBLAS_LT;
    REQUIRE_MESSAGE(kName.find('/') == kName.npos, why);
    MESSAGE("skipped: " << why);
  }
  return library;
}

}  // namespace turbomind::cuda
