#pragma once

// A buffer that the host rewrites for each step, and its copy on the GPU.

#include <cstddef>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

class MirroredBytes {
 public:
  // REQUIRES: the stream outlives this object.
  explicit MirroredBytes(Stream stream);
  ~MirroredBytes();
  MirroredBytes(const MirroredBytes&) = delete;
  MirroredBytes& operator=(const MirroredBytes&) = delete;

  // Make room for `num_bytes` on both sides. Waits until the last Upload is done, so that the host
  // side may be overwritten. Throws std::bad_alloc.
  void Reserve(size_t num_bytes);
  // Copy the first `num_bytes` to the GPU in the order of the stream.
  void Upload(size_t num_bytes);

  std::byte* host() const { return host_; }
  std::byte* gpu() const { return gpu_; }
  size_t capacity() const { return capacity_; }
  // Changes whenever the addresses change.
  int generation() const { return generation_; }

 private:
  void Free();

  Stream stream_;
  Event copied_;
  std::byte* host_ = nullptr;  // pinned
  std::byte* gpu_ = nullptr;
  size_t capacity_ = 0;
  int generation_ = 0;
};

}  // namespace turbomind::cuda
