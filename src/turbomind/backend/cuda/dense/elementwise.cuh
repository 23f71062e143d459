#pragma once

// Helpers for kernels over FP32 rows: pieces of a row, and sums and maxima over threads.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {

// Values that a thread reads or writes at once. Four are one access of 16 bytes.
template <int kWidth>
struct alignas(kWidth * sizeof(float)) Floats {
  float v[kWidth];
};

template <int kWidth>
TM_DEVICE Floats<kWidth> LoadFloats(const float* p) {
  return LoadGlobal(reinterpret_cast<const Floats<kWidth>*>(p));
}
template <int kWidth>
TM_DEVICE void StoreFloats(float* p, const Floats<kWidth>& values) {
  StoreGlobal(reinterpret_cast<Floats<kWidth>*>(p), values);
}

// Add the values of all lanes. Every lane gets the same bits.
TM_DEVICE float AddInWarp(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    value += ShuffleXor(value, mask);
  }
  return value;
}

// Add the values of the first 32 num_warps threads of a block in a fixed order. Uses 4 num_warps
// bytes of shared memory, once.
TM_DEVICE float AddInBlock(float value, int thread, int num_warps) {
  const float of_warp = AddInWarp(value);
  if (num_warps == 1) {
    return of_warp;
  }
  const int lane = thread & 31;
  if (lane == 0) {
    StoreShared(SharedMemory() + thread / 32 * sizeof(float), of_warp);
  }
  SyncBlock();
  return AddInWarp(lane < num_warps ? LoadShared<float>(SharedMemory() + lane * sizeof(float))
                                    : 0.f);
}

TM_DEVICE uint64_t MaxKeyInWarp(uint64_t key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  const uint32_t highest = MaxInWarp(high);
  const uint32_t low = MaxInWarp(high == highest ? static_cast<uint32_t>(key) : 0u);
  return static_cast<uint64_t>(highest) << 32 | low;
}

// Map a value to bits in the same order: equal for zeros of both signs, always above 0. Not for
// NaN.
TM_DEVICE uint32_t OrderedBits(float value) {
  const uint32_t bits = FloatBits(value + 0.f);  // merges both zeros
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
TM_DEVICE float FloatOfOrdered(uint32_t bits) {
  return BitsFloat(bits >> 31 != 0 ? bits & 0x7FFFFFFFu : ~bits);
}

// Return a key that is larger for larger values, and for equal values larger for lower ids. Always
// above 0. Not for NaN.
TM_DEVICE uint64_t RankKey(float value, int32_t id) {
  return static_cast<uint64_t>(OrderedBits(value)) << 32 | ~static_cast<uint32_t>(id);
}
TM_DEVICE int32_t IdOfKey(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

TM_DEVICE float Sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

}  // namespace turbomind::cuda
