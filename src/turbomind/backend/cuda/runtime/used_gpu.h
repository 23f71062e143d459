#pragma once

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// Makes a GPU the current one of this thread for as long as it lives. A negative number changes
// nothing.
class UsedGpu {
 public:
  explicit UsedGpu(int gpu) : before_(CurrentGpu()), is_changed_(gpu >= 0 && gpu != before_) {
    if (is_changed_) {
      UseGpu(gpu);
    }
  }
  ~UsedGpu() {
    if (is_changed_) {
      UseGpuToFree(before_);
    }
  }
  UsedGpu(const UsedGpu&) = delete;
  UsedGpu& operator=(const UsedGpu&) = delete;

 private:
  int before_;
  bool is_changed_;
};

}  // namespace turbomind::cuda
