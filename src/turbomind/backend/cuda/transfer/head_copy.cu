// Copies heads between arrays of a caller and the FP32 rows of a step. A block copies those of one
// token, in units of four values if the array allows it. Bound: memory, which every byte crosses
// once.

#include <algorithm>

#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/backend/cuda/transfer/row_transfer.cuh"
#include "turbomind/backend/cuda/transfer/row_transfer.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr int kThreads = 256;

struct HeadCopyParams {
  CopyHeadsParams op;
  int64_t strides[4] = {};  // op.strides, which kernels cannot read
  RowType type = RowType::kF32;
  int values = 1;  // of a unit
};

__global__ void __launch_bounds__(kThreads) CopyHeadsKernel(const HeadCopyParams params) {
  BeginKernel();
  const CopyHeadsParams& op = params.op;
  const int64_t row = BlockIndexX();
  const int row_units = op.head_dim / params.values;
  std::byte* const token =
      op.array + row / op.num_tokens * params.strides[0] + row % op.num_tokens * params.strides[2];
  float* const rows = op.rows + (row * op.row_heads + op.first_head) * op.head_dim;
  for (int unit = ThreadIndexX(); unit < op.num_heads * row_units; unit += kThreads) {
    const int64_t head = unit / row_units;
    const int64_t d = int64_t{unit % row_units} * params.values;
    std::byte* const in_array = token + head * params.strides[1] + d * params.strides[3];
    auto* const in_rows = reinterpret_cast<std::byte*>(rows + head * op.head_dim + d);
    MoveUnit({.from = op.to_rows ? in_array : in_rows,
              .to = op.to_rows ? in_rows : in_array,
              .from_type = op.to_rows ? params.type : RowType::kF32,
              .to_type = op.to_rows ? RowType::kF32 : params.type,
              .values = static_cast<uint32_t>(params.values)});
  }
}

RowType RowTypeOf(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return RowType::kF32;
    case DataType::kFloat16:
      return RowType::kF16;
    case DataType::kBFloat16:
      return RowType::kBF16;
  }
  FailCheck("an array must have a dtype of floats", std::source_location::current());
}

}  // namespace

void CudaCopyHeads(Stream stream, const CopyHeadsParams& op) {
  HeadCopyParams params;
  params.op = op;
  std::copy(op.strides.begin(), op.strides.end(), params.strides);
  params.type = RowTypeOf(op.dtype);
  const int64_t bytes = SizeOf(op.dtype);
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(op.array));
  const int64_t places = address | op.strides[0] | op.strides[1] | op.strides[2];
  const bool is_whole = op.strides[3] == bytes && places % (kConvertedValues * bytes) == 0 &&
                        op.head_dim % kConvertedValues == 0;
  params.values = is_whole ? kConvertedValues : 1;
  Launch(CopyHeadsKernel, {.grid_x = int64_t{op.num_seqs} * op.num_tokens, .threads = kThreads},
         stream, params);
}

}  // namespace turbomind::cuda
