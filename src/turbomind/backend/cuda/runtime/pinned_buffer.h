#pragma once

// Bytes that the host writes anew for each step, and their copy on the GPU.

#include <cstddef>

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

class MirroredBytes {
 public:
  // The stream outlives this.
  explicit MirroredBytes(Stream stream);
  ~MirroredBytes();
  MirroredBytes(const MirroredBytes&) = delete;
  MirroredBytes& operator=(const MirroredBytes&) = delete;

  // Room for `num_bytes` that may be written: waits until the last Upload has been done. Throws
  // std::bad_alloc.
  void Reserve(size_t num_bytes);
  // Copies the first `num_bytes` in the order of the stream.
  void Upload(size_t num_bytes);

  std::byte* host() const { return host_; }
  std::byte* gpu() const { return gpu_; }
  size_t capacity() const { return capacity_; }
  // Changes whenever the addresses do.
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
