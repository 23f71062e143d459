#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

#include "turbomind/core/check.h"
#include "turbomind/core/device_memory.h"

namespace turbomind {

// Device memory without ops. It is filled with a sentinel instead of zeros, so that tests detect
// unwritten slots.
class MemoryDevice : public DeviceMemory {
 public:
  static constexpr unsigned char kSentinel = 0xAB;

  ~MemoryDevice() override { Check(reserved_bytes == 0, "all reserved memory must be released"); }

  void* Reserve(size_t num_bytes) override {
    if (reserved_bytes + num_bytes > limit_bytes) {
      throw std::bad_alloc();
    }
    void* memory = ::operator new(num_bytes, std::align_val_t(64));
    std::memset(memory, kSentinel, num_bytes);
    reserved_bytes += num_bytes;
    return memory;
  }
  void Release(void* memory, size_t num_bytes) override {
    ::operator delete(memory, std::align_val_t(64));
    reserved_bytes -= num_bytes;
  }
  void Copy(void* to, const void* from, size_t num_bytes) override {
    std::memcpy(to, from, num_bytes);
  }

  size_t reserved_bytes = 0;
  size_t limit_bytes = size_t{1} << 40;
};

}  // namespace turbomind
