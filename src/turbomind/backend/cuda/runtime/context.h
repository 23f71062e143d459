#pragma once

// The context that every launcher of the backend receives.

#include <cstddef>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// Scratch GPU memory, used by one op at a time. The result of Get is valid until the next op of the
// stream calls Get. It grows by whole multiples of step_bytes and never shrinks. If step_bytes is
// 0, it grows to exactly the requested size.
class Workspace {
 public:
  explicit Workspace(Stream stream, size_t step_bytes = 0)
      : stream_(stream), step_bytes_(step_bytes) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // 256-byte aligned, not cleared. Throws std::bad_alloc.
  void* Get(size_t num_bytes);
  size_t num_bytes() const { return num_bytes_; }
  // Changes whenever the address that Get returns changes. Recorded graphs are then invalid.
  int generation() const { return generation_; }

 private:
  Stream stream_;
  size_t step_bytes_;
  void* memory_ = nullptr;
  size_t num_bytes_ = 0;
  int generation_ = 0;
};

struct Context {
  Stream stream = nullptr;
  GpuProperties gpu;
  bool deterministic = false;  // the sums of a row do not depend on the batch
  Workspace* workspace = nullptr;
  bool fp8_activations = false;  // of FP8 weights
  bool has_warp_groups = false;  // products of linear_wide.h
};

}  // namespace turbomind::cuda
