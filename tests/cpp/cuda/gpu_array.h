#pragma once

// Values in a GPU's memory, for every test of ops. One definition: all tests are one program where
// there is a GPU.

#include <cstddef>
#include <vector>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// A copy of values on the GPU, made and read in the order of a stream: the one that the ops run on.
template <class T>
class GpuArray {
 public:
  // `offset` values behind an aligned address.
  GpuArray(Stream stream, const std::vector<T>& values, size_t offset = 0)
      : stream_(stream), size_(values.size()), offset_(offset) {
    memory_ = static_cast<T*>(AllocateGpu((size_ + offset) * sizeof(T)));
    CopyBytes(memory_ + offset, values.data(), size_ * sizeof(T), stream);
    Synchronize(stream);  // `values` may go
  }
  ~GpuArray() { FreeGpu(memory_); }
  GpuArray(const GpuArray&) = delete;
  GpuArray& operator=(const GpuArray&) = delete;

  // Null where there is nothing.
  T* data() const { return size_ > 0 ? memory_ + offset_ : nullptr; }
  // After all that the stream was given.
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
