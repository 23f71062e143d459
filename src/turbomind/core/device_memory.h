#pragma once

#include <cstddef>

namespace turbomind {

// The memory interface of a device. Device (ops/device.h) is the whole interface.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Reserves zero-filled memory, aligned to at least 64 bytes. If the system supports it, physical
  // pages are allocated on first touch. Throws std::bad_alloc.
  virtual void* Reserve(size_t num_bytes) = 0;
  virtual void Release(void* memory, size_t num_bytes) = 0;
  // Copies in order with the ops. Host data that it writes is valid after Synchronize(); host data
  // that it reads must stay valid until then.
  virtual void Copy(void* to, const void* from, size_t num_bytes) = 0;
  virtual void Synchronize() {}
};

}  // namespace turbomind
