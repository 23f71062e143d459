#pragma once

#include <cstddef>

namespace turbomind {

// The memory of a device. The whole interface of a device is Device (ops/device.h).
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Zero-filled memory, 64-byte aligned at least; physical pages are taken when first touched where
  // the system can. Throws std::bad_alloc.
  virtual void* Reserve(size_t num_bytes) = 0;
  virtual void Release(void* memory, size_t num_bytes) = 0;
  // In order with the ops; what it writes on the host is there after Synchronize(), and what it
  // reads there stays until then.
  virtual void Copy(void* to, const void* from, size_t num_bytes) = 0;
  virtual void Synchronize() {}
};

}  // namespace turbomind
