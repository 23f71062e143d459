#include "kvx/src/gpu.h"

#include "kvx/kvx_abi.h"
#include "kvx/src/validate.h"
#include "turbomind/backend/cuda_loader.h"

namespace kvx {
namespace {

const turbomind::CudaLibrary& CudaLibrary() {
  const turbomind::CudaLibrary* const library = turbomind::FindCudaLibrary();
  Require(library != nullptr, KVX_STATUS_UNSUPPORTED);
  return *library;
}

void RequireQueued(turbomind::TransferResult result) {
  switch (result) {
    case turbomind::TransferResult::kQueued:
      return;
    case turbomind::TransferResult::kNotGpuMemory:
      throw Refusal{KVX_STATUS_INVALID_ARGUMENT};
    case turbomind::TransferResult::kOtherGpu:
      throw Refusal{KVX_STATUS_UNSUPPORTED};
    case turbomind::TransferResult::kFailed:
      throw Refusal{KVX_STATUS_INTERNAL_ERROR};
  }
}

}  // namespace

void WriteOnGpu(const turbomind::RowWrite& write, void* stream) {
  RequireQueued(CudaLibrary().write_rows(write, stream));
}

void GatherOnGpu(const turbomind::RowGather& gather, void* stream) {
  RequireQueued(CudaLibrary().gather_rows(gather, stream));
}

void WaitForStream(void* stream, void* other) {
  RequireQueued(CudaLibrary().wait_stream(stream, other));
}

}  // namespace kvx
