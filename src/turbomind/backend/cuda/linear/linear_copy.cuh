#pragma once

// ⑥ Copies rows of x into another format for the linear kernels.

#include <cstdint>

#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/linear/weight_fragments.cuh"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {

// Types and orders of the copied columns. WideKernel multiplies 16 columns at a time, in which lane
// t has the columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. These are the columns that it has of the
// weights (FirstCol). kWideSplit is for formats with SplitsColumns.
enum class RowOrder : uint8_t { kFloat, kBFloat, kWide, kWideFp8, kWideSplit };
inline constexpr int kWideCols = 64;  // that WideKernel multiplies at a time

// Return the column of x at position `i` of a copy, where i is even. The next position has the next
// column.
template <RowOrder kOrder>
TM_DEVICE int ColumnAt(int i) {
  if constexpr (kOrder == RowOrder::kFloat || kOrder == RowOrder::kBFloat) {
    return i;
  }
  constexpr auto kFormat = kOrder == RowOrder::kWideFp8     ? MatrixFormat::kFp8
                           : kOrder == RowOrder::kWideSplit ? MatrixFormat::kQ6_K
                                                            : MatrixFormat::kMxfp4;
  static_assert(UnitCols(kFormat) == kWideCols);
  const int within = i % 32;
  return i / kWideCols * kWideCols + FirstCol<kFormat>(i / 32 % 2, within % 8 / 2) +
         within / 16 * SecondCols(kFormat) + within % 16 / 8 * 2;
}

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

// Grid: rows × parts of kCopyThreads * kCopyCols columns. REQUIRES: out_cols is a multiple of 4, of
// 8 with kBFloat, or of kWideCols with the other orders.
template <RowOrder kOrder>
__global__ void __launch_bounds__(kCopyThreads) CopyRowsKernel(CopyRowsParams params) {
  BeginKernel();
  constexpr bool kInOrder = kOrder == RowOrder::kFloat || kOrder == RowOrder::kBFloat;
  const int col = (BlockIndexY() * kCopyThreads + ThreadIndexX()) * kCopyCols;
  if (col >= params.out_cols) {
    return;
  }
  const int64_t row = BlockIndexX();
  const int64_t x_row = params.x_rows != nullptr ? LoadGlobal(params.x_rows + row) : row;
  const float* from = params.x + x_row * params.x_stride;
  Words<16> words[2];
  if (kInOrder && reinterpret_cast<uintptr_t>(from) % 16 == 0 && col + kCopyCols <= params.cols) {
    words[0] = LoadGlobal(reinterpret_cast<const Words<16>*>(from + col));
    words[1] = LoadGlobal(reinterpret_cast<const Words<16>*>(from + col) + 1);
  } else {
#pragma unroll
    for (int i = 0; i < kCopyCols; ++i) {
      const int at = ColumnAt<kOrder>(col + i / 2 * 2) + i % 2;
      words[i / 4].v[i % 4] = at < params.cols ? FloatBits(LoadGlobal(from + at)) : 0;
    }
  }
  if constexpr (kOrder == RowOrder::kFloat) {
    auto* to =
        reinterpret_cast<Words<16>*>(static_cast<float*>(params.out) + row * params.out_cols + col);
    StoreGlobal(to, words[0]);
    if (col + 4 < params.out_cols) {
      StoreGlobal(to + 1, words[1]);
    }
  } else {
    Words<16> rounded;
#pragma unroll
    for (int i = 0; i < kCopyCols; i += 2) {
      rounded.v[i / 2] =
          PackBFloat2(BitsFloat(words[i / 4].v[i % 4]), BitsFloat(words[i / 4].v[i % 4 + 1]));
    }
    StoreGlobal(reinterpret_cast<Words<16>*>(static_cast<uint16_t*>(params.out) +
                                             row * params.out_cols + col),
                rounded);
  }
}

// Copy the rows of x in the order of y's rows.
template <RowOrder kOrder>
void CopyRows(const Context& ctx, const LinearKernelParams& from, int out_cols, void* out) {
  const CopyRowsParams params = {from.x, from.x_stride, from.x_rows, from.cols, out, out_cols};
  const LaunchShape shape = {.grid_x = from.num_rows,
                             .grid_y = CeilDiv(out_cols, kCopyThreads * kCopyCols),
                             .threads = kCopyThreads};
  Launch(CopyRowsKernel<kOrder>, shape, ctx.stream, params);
}

}  // namespace turbomind::cuda
