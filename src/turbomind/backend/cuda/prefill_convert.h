#pragma once

// ⑦ BF16 → FP16, in place: rows of 16 bits beside quantised ones, whose operands are FP16.

#include <cstdint>

#include "turbomind/backend/cuda/decode_shape.h"
#include "turbomind/backend/cuda/intrinsics.h"

namespace turbomind::cuda {

inline constexpr int kConvertThreads = 256;
inline constexpr int kConvertValues = 8;  // of a thread

struct ConvertParams {
  uint16_t* values = nullptr;  // 16-byte aligned
  int64_t num_values = 0;      // a multiple of kConvertValues
};

// Grid: num_values / (kConvertThreads * kConvertValues), rounded up.
inline __global__ void __launch_bounds__(kConvertThreads) ConvertKernel(ConvertParams p) {
  const int64_t i =
      (static_cast<int64_t>(BlockIndexX()) * kConvertThreads + ThreadIndexX()) * kConvertValues;
  if (i >= p.num_values) {
    return;
  }
  auto* const at = reinterpret_cast<Words<16>*>(p.values + i);
  Words<16> pairs = LoadGlobal(at);
#pragma unroll
  for (uint32_t& pair : pairs.v) {
    pair = PackHalf2(FiniteHalf(BitsFloat(pair << 16)), FiniteHalf(BitsFloat(pair & 0xffff0000u)));
  }
  StoreGlobal(at, pairs);
}

}  // namespace turbomind::cuda
