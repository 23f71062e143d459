#pragma once

// ⑥ Kernels around the library's products of FP8: activations become E4M3 codes with scales, and
// the scales of weights are collected.
//
// A scale is the largest magnitude of its values divided by 448, so no finite value saturates. If a
// value is NaN or infinite, its scale is NaN, and so are the outputs of its row.

#include <cstdint>

#include "turbomind/backend/cuda/linear/matrix_layout.h"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {

struct QuantizeRowsParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  int cols = 0;
  int num_rows = 0;
  uint8_t* codes = nullptr;  // [num_rows, out_cols]
  int out_cols = 0;          // whole units; codes beyond cols are zero
  float* scales = nullptr;   // [num_rows], or [ceil(out_cols / 128), num_rows]
};

inline constexpr int kQuantizeWarps = 8;

struct CodeScale {
  float scale;
  float inverse;
};

// Return the scale for values whose largest magnitude has these bits.
TM_DEVICE CodeScale ScaleOfLargest(uint32_t bits) {
  constexpr float kLeast = 0x1p-100f;  // below it the inverse would overflow
  if (bits >= 0x7f800000u) {
    return {BitsFloat(0x7fc00000u), 0.f};
  }
  const float largest = BitsFloat(bits) > kLeast ? BitsFloat(bits) : kLeast;
  return {largest / kLargestE4m3, kLargestE4m3 / largest};
}

// Load the lane's 4 values of a group of 128 columns.
TM_DEVICE void LoadFour(const float* row, int col, int cols, float (&x)[4]) {
  const float* from = row + col;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0 && col + 4 <= cols) {
    const auto words = LoadGlobal(reinterpret_cast<const Words<16>*>(from));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = BitsFloat(words.v[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = col + i < cols ? LoadGlobal(from + i) : 0.f;
  }
}

// Return the larger of `bits` and the bits of the magnitudes. The bits of NaN are the largest.
TM_DEVICE uint32_t MaxBits(uint32_t bits, const float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t own = FloatBits(x[i]) & 0x7fffffffu;
    bits = own > bits ? own : bits;
  }
  return bits;
}

// Store 4 codes, unless the columns do not exist.
TM_DEVICE void StoreFour(const QuantizeRowsParams& p, int64_t row, int col, const float (&x)[4],
                         float inverse) {
  if (col < p.out_cols) {
    const uint32_t codes =
        PackE4m3(x[0] * inverse, x[1] * inverse) | PackE4m3(x[2] * inverse, x[3] * inverse) << 16;
    StoreGlobal(reinterpret_cast<uint32_t*>(p.codes + row * p.out_cols + col), codes);
  }
}

// One scale for each 128 columns. Grid: rows × parts of kQuantizeWarps groups of 128 columns.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps) QuantizeGroupsKernel(QuantizeRowsParams params) {
  BeginKernel();
  const int group = BlockIndexY() * kWarps + (ThreadIndexX() >> 5);
  const int lane = ThreadIndexX() & 31;
  const int64_t row = BlockIndexX();
  const int col = group * kFp8ScaleCols + 4 * lane;
  if (group * kFp8ScaleCols >= params.out_cols) {
    return;
  }
  float x[4];
  LoadFour(params.x + row * params.x_stride, col, params.cols, x);
  const CodeScale scale = ScaleOfLargest(MaxInWarp(MaxBits(0, x)));
  StoreFour(params, row, col, x, scale.inverse);
  if (lane == 0) {
    StoreGlobal(params.scales + int64_t{group} * params.num_rows + row, scale.scale);
  }
}

// One scale for each row. Grid: rows.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps) QuantizeRowsKernel(QuantizeRowsParams params) {
  BeginKernel();
  const int64_t row = BlockIndexX();
  const float* from = params.x + row * params.x_stride;
  uint32_t bits = 0;
  float x[4];
  for (int col = 4 * ThreadIndexX(); col < params.cols; col += 128 * kWarps) {
    LoadFour(from, col, params.cols, x);
    bits = MaxBits(bits, x);
  }
  bits = MaxInWarp(bits);
  auto* shared = reinterpret_cast<uint32_t*>(SharedMemory());
  if ((ThreadIndexX() & 31) == 0) {
    StoreShared(shared + (ThreadIndexX() >> 5), bits);
  }
  SyncBlock();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const auto other = LoadShared<uint32_t>(shared + warp);
    bits = other > bits ? other : bits;
  }
  const CodeScale scale = ScaleOfLargest(bits);
  for (int col = 4 * ThreadIndexX(); col < params.out_cols; col += 128 * kWarps) {
    LoadFour(from, col, params.cols, x);
    StoreFour(params, row, col, x, scale.inverse);
  }
  if (ThreadIndexX() == 0) {
    StoreGlobal(params.scales + row, scale.scale);
  }
}

struct CollectScalesParams {
  const char* weight = nullptr;
  int64_t row_bytes = 0;
  int outputs = 0;
  float* out = nullptr;  // [gridDim.y, outputs]
};

inline constexpr int kCollectThreads = 128;

// Grid: parts of kThreads outputs × scales of a row.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) CollectScalesKernel(CollectScalesParams params) {
  BeginKernel();
  const int64_t output = BlockIndexX() * kThreads + ThreadIndexX();
  const int scale = BlockIndexY();
  if (output < params.outputs) {
    const auto* end =
        reinterpret_cast<const float*>(params.weight + (output + 1) * params.row_bytes);
    StoreGlobal(params.out + int64_t{scale} * params.outputs + output, LoadGlobal(end - 1 - scale));
  }
}

struct AddBiasParams {
  const float* bias = nullptr;  // [outputs]
  int outputs = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

// Grid: rows × parts of kThreads outputs.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) AddBiasKernel(AddBiasParams params) {
  BeginKernel();
  const int output = BlockIndexY() * kThreads + ThreadIndexX();
  if (output < params.outputs) {
    float* y = params.y + BlockIndexX() * params.y_stride + output;
    StoreGlobal(y, LoadGlobal(static_cast<const float*>(y)) + LoadGlobal(params.bias + output));
  }
}

}  // namespace turbomind::cuda
