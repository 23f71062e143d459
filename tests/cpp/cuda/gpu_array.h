#pragma once

// Values in GPU memory, for all op tests. They share one definition because on a GPU all tests are
// one program.

#include <cstddef>
#include <vector>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// A copy of values on the GPU, made and read in the order of a stream. The ops run on the same
// stream.
template <class T>
class GpuArray {
 public:
  // The values begin `offset` elements after an aligned address.
  GpuArray(Stream stream, const std::vector<T>& values, size_t offset = 0)
      : stream_(stream), size_(values.size()), offset_(offset) {
    memory_ = static_cast<T*>(AllocateGpu((size_ + offset) * sizeof(T)));
    CopyBytes(memory_ + offset, values.data(), size_ * sizeof(T), stream);
    Synchronize(stream);  // `values` may be destroyed after this
  }
  ~GpuArray() { FreeGpu(memory_); }
  GpuArray(const GpuArray&) = delete;
  GpuArray& operator=(const GpuArray&) = delete;

  // Null if there are no values.
  T* data() const { return size_ > 0 ? memory_ + offset_ : nullptr; }
  // Read the values after all work that was queued on the stream.
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    CopyBytes(values.data(), data(), size_ * sizeof(T), stream_);
    Synchronize(stream_);
    return values;
  }

 private:
  Stream stream_;
  size_t size_;
  size_t offset_;
  T* memory_;
};

}  // namespace turbomind::cuda
