#pragma once

#include <cstddef>
#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind {

// The same part of every slot of a pool of states: one array of FP32 of one layer, or the whole
// slot. Plain data.
struct StateView {
  std::byte* data = nullptr;  // that of slot 0
  int64_t slot_bytes = 0;     // between slots, a multiple of 64

  TM_HD float* At(int64_t slot) const { return reinterpret_cast<float*>(data + slot * slot_bytes); }
};

}  // namespace turbomind
