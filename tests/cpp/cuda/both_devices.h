#pragma once

// Runs the same op on the CPU and on the GPU with the same values.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/cuda_device.h"

namespace turbomind::testing {

inline constexpr int kCpu = 0;
inline constexpr int kGpu = 1;

struct Devices {
  std::unique_ptr<Device> of[2] = {MakeCpuDevice(1), cuda::MakeDevice(0, {})};
};

// An array in the memory of both devices.
template <class T>
class Both {
 public:
  Both(Devices& devices, const std::vector<T>& values) : devices_(devices), size_(values.size()) {
    for (const int side : {kCpu, kGpu}) {
      data_[side] = static_cast<T*>(devices.of[side]->Reserve(num_bytes()));
    }
    Write(values);
  }
  ~Both() {
    for (const int side : {kCpu, kGpu}) {
      devices_.of[side]->Release(data_[side], num_bytes());
    }
  }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;

  T* operator[](int side) const { return data_[side]; }
  size_t size() const { return size_; }
  // Overwrite the first values.
  void Write(const std::vector<T>& values) {
    for (const int side : {kCpu, kGpu}) {
      devices_.of[side]->Copy(data_[side], values.data(), values.size() * sizeof(T));
      devices_.of[side]->Synchronize();
    }
  }
  std::vector<T> Read(int side) const {
    std::vector<T> values(size_);
    devices_.of[side]->Copy(values.data(), data_[side], num_bytes());
    devices_.of[side]->Synchronize();
    return values;
  }
  bool Same() const {
    const std::vector<T> a = Read(kCpu);
    const std::vector<T> b = Read(kGpu);
    return std::memcmp(a.data(), b.data(), num_bytes()) == 0;
  }

 private:
  size_t num_bytes() const { return size_ * sizeof(T); }

  Devices& devices_;
  size_t size_;
  T* data_[2] = {};
};

inline std::vector<float> Normal(size_t size, unsigned seed, float deviation = 1.f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.f, deviation);
  std::vector<float> values(size);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

// Outputs that an op must overwrite completely.
inline std::vector<float> Unwritten(size_t size) { return std::vector<float>(size, NAN); }

// Return the error relative to the L2 norm of the first `size` values, or NaN if some value was not
// written.
inline double RelativeError(const Both<float>& values, size_t size) {
  const std::vector<float> want = values.Read(kCpu);
  const std::vector<float> got = values.Read(kGpu);
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < size; ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace turbomind::testing
