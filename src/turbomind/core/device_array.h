#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "turbomind/core/device_memory.h"

namespace turbomind {

// FP32 values in a device's memory. The constructor copies `values`, which may be freed when it
// returns. The device must outlive the array.
class DeviceArray {
 public:
  DeviceArray() = default;
  // Throws std::bad_alloc.
  DeviceArray(DeviceMemory& device, const float* values, int64_t size) : size_(size) {
    if (size > 0) {
      device_ = &device;
      data_ = static_cast<float*>(device.Reserve(num_bytes()));
      device.Copy(data_, values, num_bytes());
      device.Synchronize();
    }
  }
  ~DeviceArray() {
    if (data_ != nullptr) {
      device_->Release(data_, num_bytes());
    }
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  const float* data() const { return data_; }  // null if empty
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  size_t num_bytes() const { return static_cast<size_t>(size_) * sizeof(float); }

 private:
  DeviceMemory* device_ = nullptr;
  float* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace turbomind
