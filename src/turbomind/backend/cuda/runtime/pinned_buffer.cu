#include <bit>

#include "turbomind/backend/cuda/runtime/pinned_buffer.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {

MirroredBytes::MirroredBytes(Stream stream) : stream_(stream), copied_(CreateEvent()) {
  Record(copied_, stream_);
}

MirroredBytes::~MirroredBytes() {
  Free();
  DestroyEvent(copied_);
}

void MirroredBytes::Free() {
  if (capacity_ > 0) {
    FreePinned(host_);
    FreeGpu(gpu_);
  }
  capacity_ = 0;
}

void MirroredBytes::Reserve(size_t num_bytes) {
  WaitFor(copied_);
  if (num_bytes <= capacity_) {
    return;
  }
  Synchronize(stream_);
  Free();
  ++generation_;  // even if an allocation below fails
  const size_t capacity = std::bit_ceil(num_bytes);
  host_ = static_cast<std::byte*>(AllocatePinned(capacity));
  try {
    gpu_ = static_cast<std::byte*>(AllocateGpu(capacity));
  } catch (...) {
    FreePinned(host_);
    throw;
  }
  capacity_ = capacity;
}

void MirroredBytes::Upload(size_t num_bytes) {
  Check(num_bytes <= capacity_, "Reserve must come before Upload of as many bytes");
  CopyBytes(gpu_, host_, num_bytes, stream_);
  Record(copied_, stream_);
}

}  // namespace turbomind::cuda
