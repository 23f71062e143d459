#include <algorithm>

#include "turbomind/backend/cuda/linear/linear_fp8.cuh"
#include "turbomind/backend/cuda/linear/linear_fp8.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {
namespace {

// The library pads the distance of columns of scales to 16 bytes, or not: a multiple of this many
// rows is the same for both.
constexpr int kRowsPerScaleColumn = 4;
constexpr int kBiasThreads = 128;

// Parts of the workspace.
struct Fp8Memory {
  uint8_t* codes = nullptr;   // of x
  float* x_scales = nullptr;  // like Fp8Product
  float* w_scales = nullptr;
  char* library = nullptr;
};

int64_t Align(int64_t num_bytes) { return CeilDiv(num_bytes, 256) * 256; }

Fp8Memory PlanMemory(const Context& ctx, const LinearKernelParams& linear, int64_t num_scales) {
  int64_t outputs = 0;
  for (int i = 0; i < linear.num_segments; ++i) {
    outputs = std::max<int64_t>(outputs, linear.segments[i].outputs);
  }
  const int64_t codes = Align(int64_t{linear.num_rows} * linear.cols);
  const int64_t x_scales = Align(linear.num_rows * num_scales * 4);
  const int64_t w_scales = Align(outputs * num_scales * 4);
  char* memory = static_cast<char*>(ctx.workspace->Get(
      static_cast<size_t>(codes + x_scales + w_scales) + CublasLt::kWorkspaceBytes));
  return {reinterpret_cast<uint8_t*>(memory), reinterpret_cast<float*>(memory + codes),
          reinterpret_cast<float*>(memory + codes + x_scales),
          memory + codes + x_scales + w_scales};
}

void QuantizeRows(const Context& ctx, const LinearKernelParams& params, int out_cols,
                  bool in_groups, const Fp8Memory& memory) {
  const QuantizeRowsParams kernel = {params.x,     params.x_stride, params.cols,    params.num_rows,
                                     memory.codes, out_cols,        memory.x_scales};
  constexpr int kThreads = 32 * kQuantizeWarps;
  if (in_groups) {
    Launch(QuantizeGroupsKernel<kQuantizeWarps>,
           {.grid_x = params.num_rows,
            .grid_y = CeilDiv(out_cols, kFp8ScaleCols * kQuantizeWarps),
            .threads = kThreads},
           ctx.stream, kernel);
  } else {
    Launch(QuantizeRowsKernel<kQuantizeWarps>,
           {.grid_x = params.num_rows, .threads = kThreads, .shared_bytes = kQuantizeWarps * 4},
           ctx.stream, kernel);
  }
}

// Multiply segment `i`, whose x is quantized. Return false if the library cannot.
bool MultiplySegment(const Context& ctx, const LinearKernelParams& linear, int i,
                     MatrixFormat stored, const Fp8Memory& memory, CublasLt& library) {
  const LinearSegment& segment = linear.segments[i];
  const int64_t row_bytes = RowBytes(stored, linear.cols);
  Launch(CollectScalesKernel<kCollectThreads>,
         {.grid_x = CeilDiv(segment.outputs, kCollectThreads),
          .grid_y = NumFp8Scales(stored, linear.cols),
          .threads = kCollectThreads},
         ctx.stream,
         CollectScalesParams{segment.weight, row_bytes, segment.outputs, memory.w_scales});
  Fp8Product product;
  product.codes.w = segment.weight;
  product.codes.x = memory.codes;
  product.codes.y = linear.y + segment.first_output;
  product.codes.y_stride = linear.y_stride;
  product.codes.outputs = segment.outputs;
  product.codes.rows = linear.num_rows;
  product.codes.cols = linear.cols;
  product.codes.accumulate = linear.accumulate;
  product.w_stride = row_bytes;
  product.in_groups = stored == MatrixFormat::kFp8Block;
  product.w_scales = memory.w_scales;
  product.x_scales = memory.x_scales;
  if (!library.Multiply(product, memory.library, ctx.stream)) {
    return false;
  }
  if (segment.bias != nullptr) {
    Launch(AddBiasKernel<kBiasThreads>,
           {.grid_x = linear.num_rows,
            .grid_y = CeilDiv(segment.outputs, kBiasThreads),
            .threads = kBiasThreads},
           ctx.stream,
           AddBiasParams{segment.bias, segment.outputs, product.codes.y, linear.y_stride});
  }
  return true;
}

}  // namespace

LinearKernelParams RunFp8Library(const Context& ctx, const LinearKernelParams& params,
                                 MatrixFormat stored, CublasLt& library) {
  const bool in_groups = stored == MatrixFormat::kFp8Block;
  if (in_groups && params.num_rows % kRowsPerScaleColumn != 0) {
    return params;
  }
  LinearKernelParams linear = params;
  linear.cols = NumUnits(stored, params.cols) * UnitCols(stored);
  const Fp8Memory memory = PlanMemory(ctx, linear, NumFp8Scales(stored, linear.cols));
  QuantizeRows(ctx, params, linear.cols, in_groups, memory);
  LinearKernelParams rest = params;
  rest.num_segments = 0;
  for (int i = 0; i < linear.num_segments; ++i) {
    if (!MultiplySegment(ctx, linear, i, stored, memory, library)) {
      rest.segments[rest.num_segments++] = linear.segments[i];
    }
  }
  return rest;
}

}  // namespace turbomind::cuda
