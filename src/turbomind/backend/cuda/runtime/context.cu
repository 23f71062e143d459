#include "turbomind/backend/cuda/runtime/context.h"

namespace turbomind::cuda {

Workspace::~Workspace() {
  if (memory_ != nullptr) {
    FreeGpu(memory_);
  }
}

void* Workspace::Get(size_t num_bytes) {
  if (num_bytes <= num_bytes_) {
    return memory_;
  }
  Synchronize(stream_);
  if (memory_ != nullptr) {
    FreeGpu(memory_);
  }
  ++generation_;  // even if the allocation below fails
  memory_ = nullptr;
  num_bytes_ = 0;
  if (step_bytes_ > 0) {
    num_bytes = (num_bytes + step_bytes_ - 1) / step_bytes_ * step_bytes_;
  }
  memory_ = AllocateGpu(num_bytes);
  num_bytes_ = num_bytes;
  return memory_;
}

}  // namespace turbomind::cuda
