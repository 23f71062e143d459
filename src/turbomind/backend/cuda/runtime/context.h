#pragma once

// What every launcher of the backend is given.

#include <cstddef>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// GPU memory that one op uses at a time: what Get returns is the caller's until the next op of the
// stream asks. Grows by whole multiples of step_bytes, never shrinks; 0: to what is asked for.
class Workspace {
 public:
  explicit Workspace(Stream stream, size_t step_bytes = 0)
      : stream_(stream), step_bytes_(step_bytes) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // 256-byte aligned, not cleared. Throws std::bad_alloc.
  void* Get(size_t num_bytes);
  // Changes whenever Get's address does: recorded graphs are void then.
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
  bool deterministic = false;  // sums of a row do not depend on the batch
  Workspace* workspace = nullptr;
};

}  // namespace turbomind::cuda
