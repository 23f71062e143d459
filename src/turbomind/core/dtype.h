#pragma once

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind {

// Element types of the cache and of vectors that cross the Python boundary.
enum class DataType : uint8_t { kFloat32, kFloat16, kBFloat16 };

TM_HD constexpr int SizeOf(DataType dtype) { return dtype == DataType::kFloat32 ? 4 : 2; }

constexpr const char* ToString(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat16:
      return "float16";
    case DataType::kBFloat16:
      return "bfloat16";
  }
  return "?";
}

}  // namespace turbomind
