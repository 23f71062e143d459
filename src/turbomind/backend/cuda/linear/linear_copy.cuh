#pragma once

// ⑥ Copies rows of x into another format for the linear kernels.

#include <cstdint>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {

struct CopyRowsParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [gridDim.x] or null
  int cols = 0;
  void* out = nullptr;  // [gridDim.x, out_cols] FP32 or BF16
  int out_cols = 0;     // a multiple of 4; zeros beyond cols
};

inline constexpr int kCopyThreads = 128;
inline constexpr int kCopyCols = 8;  // per thread

// Grid: rows × parts of kCopyThreads * kCopyCols columns. REQUIRES: out_cols is a multiple of 4, or
// of 8 with kBFloat.
template <bool kBFloat>
__global__ void __launch_bounds__(kCopyThreads) CopyRowsKernel(CopyRowsParams params) {
  const int col = (BlockIndexY() * kCopyThreads + ThreadIndexX()) * kCopyCols;
  if (col >= params.out_cols) {
    return;
  }
  const int64_t row = BlockIndexX();
  const int64_t x_row = params.x_rows != nullptr ? LoadGlobal(params.x_rows + row) : row;
  const float* from = params.x + x_row * params.x_stride + col;
  Words<16> words[2];
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0 && col + kCopyCols <= params.cols) {
    words[0] = LoadGlobal(reinterpret_cast<const Words<16>*>(from));
    words[1] = LoadGlobal(reinterpret_cast<const Words<16>*>(from) + 1);
  } else {
#pragma unroll
    for (int i = 0; i < kCopyCols; ++i) {
      words[i / 4].v[i % 4] = col + i < params.cols ? FloatBits(LoadGlobal(from + i)) : 0;
    }
  }
  if constexpr (kBFloat) {
    Words<16> rounded;
#pragma unroll
    for (int i = 0; i < kCopyCols; i += 2) {
      rounded.v[i / 2] =
          PackBFloat2(BitsFloat(words[i / 4].v[i % 4]), BitsFloat(words[i / 4].v[i % 4 + 1]));
    }
    StoreGlobal(reinterpret_cast<Words<16>*>(static_cast<uint16_t*>(params.out) +
                                             row * params.out_cols + col),
                rounded);
  } else {
    auto* to =
        reinterpret_cast<Words<16>*>(static_cast<float*>(params.out) + row * params.out_cols + col);
    StoreGlobal(to, words[0]);
    if (col + 4 < params.out_cols) {
      StoreGlobal(to + 1, words[1]);
    }
  }
}

}  // namespace turbomind::cuda
