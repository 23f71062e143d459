#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "turbomind/core/device_memory.h"

namespace turbomind {

// Values in a device's memory. The constructor copies `values`, which may be freed when it returns.
// The device must outlive the array.
template <class T>
class DeviceArrayOf {
 public:
  DeviceArrayOf() = default;
  // Throws std::bad_alloc.
  DeviceArrayOf(DeviceMemory& device, const T* values, int64_t size) : size_(size) {
    if (size > 0) {
      device_ = &device;
      data_ = static_cast<T*>(device.Reserve(num_bytes()));
      device.Copy(data_, values, num_bytes());
      device.Synchronize();
    }
  }
  ~DeviceArrayOf() {
    if (data_ != nullptr) {
      device_->Release(data_, num_bytes());
    }
  }
  DeviceArrayOf(DeviceArrayOf&& other) noexcept { *this = std::move(other); }
  DeviceArrayOf& operator=(DeviceArrayOf&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  const T* data() const { return data_; }  // null if empty
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  size_t num_bytes() const { return static_cast<size_t>(size_) * sizeof(T); }

 private:
  DeviceMemory* device_ = nullptr;
  T* data_ = nullptr;
  int64_t size_ = 0;
};
using DeviceArray = DeviceArrayOf<float>;

}  // namespace turbomind
