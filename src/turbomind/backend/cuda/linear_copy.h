#pragma once

// ⑥ Rows of x as the kernels of linear layers want them, for the few calls where they are not: at
// multiples of 16 bytes, whole units long, zero beyond the matrix.

#include <cstdint>

#include "turbomind/backend/cuda/intrinsics.h"

namespace turbomind::cuda {

struct AlignRowsParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [gridDim.x] or null
  int cols = 0;
  float* out = nullptr;  // [gridDim.x, out_cols]
  int out_cols = 0;
};

inline constexpr int kAlignThreads = 256;

// Grid: rows.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) AlignRowsKernel(AlignRowsParams params) {
  const int64_t row = BlockIndexX();
  const int64_t from = params.x_rows != nullptr ? LoadGlobal(params.x_rows + row) : row;
  for (int col = ThreadIndexX(); col < params.out_cols; col += kThreads) {
    const float value =
        col < params.cols ? LoadGlobal(params.x + from * params.x_stride + col) : 0.f;
    StoreGlobal(params.out + row * params.out_cols + col, value);
  }
}

}  // namespace turbomind::cuda
