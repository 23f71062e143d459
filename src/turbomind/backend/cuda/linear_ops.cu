#include <algorithm>

#include "turbomind/backend/cuda/cuda_matrix.h"
#include "turbomind/backend/cuda/embed_kernels.h"
#include "turbomind/backend/cuda/launch.h"
#include "turbomind/backend/cuda/linear_copy.h"
#include "turbomind/backend/cuda/linear_exact.h"
#include "turbomind/backend/cuda/linear_ops.h"
#include "turbomind/backend/cuda/linear_stream.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// Warps of the matrices' first row tile that fill a large GPU (132 SMs, 32 to 48 each).
constexpr int64_t kWantedWarps = 6144;
// Tiles that two by two give every SM a block; two share what is read of x.
constexpr int64_t kWantedTiles = 264;
constexpr int kLeastUnits = 5;  // of a slice: less is over before its first loads are back

const CudaMatrix& Weight(const LinearPart& part) {
  return static_cast<const CudaMatrix&>(*part.weight);
}

// Gives each segment its blocks of `outputs` outputs; returns their number.
int64_t CutOutputs(LinearKernelParams* params, int outputs) {
  int64_t blocks = 0;
  for (int i = 0; i < params->num_segments; ++i) {
    params->segments[i].first_block = static_cast<int32_t>(blocks);
    blocks += CeilDiv(params->segments[i].outputs, outputs);
  }
  return blocks;
}

template <class C>
void RunStreamKernel(const Context& ctx, StreamParams params) {
  LinearKernelParams& linear = params.linear;
  const SlotCount slots = CountSlots(linear.num_rows, linear.num_experts, C::kRows);
  linear.slot_is_row = slots.slot_is_row;
  const LaunchShape shape = {.grid_x = slots.slots,
                             .grid_y = CutOutputs(&linear, C::kOutputs),
                             .threads = 32 * params.slices,
                             .shared_bytes = static_cast<size_t>(C::SharedBytes(params.slices))};
  Launch(StreamKernel<C>, shape, ctx.stream, params);
}

template <MatrixFormat F>
void RunStream(const Context& ctx, const StreamParams& params, int64_t outputs) {
  if (params.linear.num_rows > 8) {
    RunStreamKernel<StreamConfig<F, 2, 2>>(ctx, params);
  } else if (NumTiles(outputs) * params.slices >= kWantedWarps ||
             (params.linear.num_rows > 2 && NumTiles(outputs) >= kWantedTiles)) {
    RunStreamKernel<StreamConfig<F, 2, 1>>(ctx, params);
  } else {
    RunStreamKernel<StreamConfig<F, 1, 1>>(ctx, params);
  }
}

void RunExact(const Context& ctx, LinearKernelParams params) {
  const SlotCount slots = CountSlots(params.num_rows, params.num_experts, kExactRows);
  params.slot_is_row = slots.slot_is_row;
  const LaunchShape shape = {.grid_x = slots.slots,
                             .grid_y = CutOutputs(&params, kExactOutputs),
                             .threads = 32 * kExactWarps,
                             .shared_bytes = kExactSharedBytes};
  Launch(ExactLinearKernel<kExactWarps>, shape, ctx.stream, params);
}

// Where rows of x are not as the kernels want them, takes a copy that is, in order of y's rows.
void AlignX(const Context& ctx, MatrixFormat stored, LinearKernelParams* params) {
  const int cols = params->cols;
  params->cols = NumUnits(stored, cols) * UnitCols(stored);
  const bool aligned =
      reinterpret_cast<uintptr_t>(params->x) % 16 == 0 && params->x_stride % 4 == 0;
  if (aligned && params->cols == cols) {
    return;
  }
  const int64_t num_rows = params->num_rows;
  auto* copy = static_cast<float*>(
      ctx.workspace->Get(static_cast<size_t>(num_rows * params->cols) * sizeof(float)));
  Launch(AlignRowsKernel<kAlignThreads>, {.grid_x = num_rows, .threads = kAlignThreads}, ctx.stream,
         AlignRowsParams{params->x, params->x_stride, params->x_rows, cols, copy, params->cols});
  params->x = copy;
  params->x_stride = params->cols;
  params->x_rows = nullptr;
}

void Run(const Context& ctx, LinearKernelParams params, MatrixFormat stored) {
  int64_t outputs = 0;
  for (int i = 0; i < params.num_segments; ++i) {
    outputs += params.segments[i].outputs;
  }
  AlignX(ctx, stored, &params);
  const StreamParams stream = {params, NumSlices(stored, outputs, params.cols)};
  switch (stored) {
    case MatrixFormat::kF32:
      return RunExact(ctx, params);
    case MatrixFormat::kBF16:
      return RunStream<MatrixFormat::kBF16>(ctx, stream, outputs);
    case MatrixFormat::kQ4_0:
      return RunStream<MatrixFormat::kQ4_0>(ctx, stream, outputs);
    case MatrixFormat::kQ4_1:
      return RunStream<MatrixFormat::kQ4_1>(ctx, stream, outputs);
    case MatrixFormat::kQ8_0:
      return RunStream<MatrixFormat::kQ8_0>(ctx, stream, outputs);
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
      return RunStream<MatrixFormat::kMxfp4>(ctx, stream, outputs);
  }
}

}  // namespace

int NumSlices(MatrixFormat stored, int64_t outputs, int64_t cols) {
  const int64_t most = std::min({int64_t{kMostSlices}, kWantedWarps / NumTiles(outputs),
                                 int64_t{NumUnits(stored, cols)} / kLeastUnits});
  int slices = 1;
  while (2 * slices <= most) {
    slices *= 2;
  }
  return slices;
}

CudaLinear::~CudaLinear() {
  for (auto& [array, table] : tables_) {
    FreeGpu(table.gpu);
  }
}

void CudaLinear::Linear(const Context& ctx, const LinearParams& params) {
  LinearKernelParams kernel;
  kernel.y = params.y;
  kernel.y_stride = params.y_stride;
  kernel.num_rows = params.num_rows;
  kernel.accumulate = params.accumulate;
  int64_t column = 0;
  for (int i = 0; i < params.num_parts;) {
    const MatrixFormat stored = params.parts[i].weight->format;
    kernel.x = params.x;
    kernel.x_stride = params.x_stride;
    kernel.cols = static_cast<int>(params.parts[i].weight->cols);
    kernel.num_segments = 0;
    for (; i < params.num_parts && kernel.num_segments < kMaxSegments; ++i) {
      const LinearPart& part = params.parts[i];
      if (part.weight->format != stored) {
        break;
      }
      kernel.segments[kernel.num_segments++] = {Weight(part).data(), part.bias, 0,
                                                static_cast<int32_t>(column),
                                                static_cast<int32_t>(part.weight->rows)};
      column += part.weight->rows;
    }
    Run(ctx, kernel, stored);
  }
}

const ExpertWeight* CudaLinear::TableOf(const Context& ctx, const GroupedLinearParams& params) {
  ExpertTable& table = tables_[params.experts];
  const auto count = static_cast<size_t>(params.num_experts);
  bool same = table.host.size() == count;
  for (size_t i = 0; i < count && same; ++i) {
    same = table.host[i].weight == Weight(params.experts[i]).data() &&
           table.host[i].bias == params.experts[i].bias;
  }
  if (same) {
    return table.gpu;
  }
  Synchronize(ctx.stream);  // nothing reads the old table
  if (table.gpu != nullptr) {
    FreeGpu(table.gpu);
    table = {};
  }
  std::vector<ExpertWeight> host(count);
  for (size_t i = 0; i < count; ++i) {
    host[i] = {Weight(params.experts[i]).data(), params.experts[i].bias};
  }
  table.gpu = static_cast<ExpertWeight*>(AllocateGpu(count * sizeof(ExpertWeight)));
  table.host = std::move(host);
  CopyBytes(table.gpu, table.host.data(), count * sizeof(ExpertWeight), ctx.stream);
  return table.gpu;
}

void CudaLinear::GroupedLinear(const Context& ctx, const GroupedLinearParams& params) {
  const PackedMatrix& weight = *params.experts[0].weight;
  LinearKernelParams kernel;
  kernel.x = params.x;
  kernel.x_stride = params.x_stride;
  kernel.cols = static_cast<int>(weight.cols);
  kernel.x_rows = params.x_rows;
  kernel.y = params.y;
  kernel.y_stride = params.y_stride;
  kernel.num_rows = params.num_rows;
  kernel.num_segments = 1;
  kernel.segments[0].outputs = static_cast<int32_t>(weight.rows);
  kernel.experts = TableOf(ctx, params);
  kernel.offsets = params.offsets;
  kernel.num_experts = params.num_experts;
  Run(ctx, kernel, weight.format);
}

void CudaLinear::Embed(const Context& ctx, const EmbedParams& params) {
  const auto& table = static_cast<const CudaMatrix&>(*params.table);
  const EmbedKernelParams kernel = {table.data(), params.ids, params.out,
                                    static_cast<int>(table.cols)};
  const LaunchShape shape = {.grid_x = params.num_tokens,
                             .grid_y = CeilDiv(table.cols, kEmbedThreads * kEmbedCols),
                             .threads = kEmbedThreads};
  switch (table.format) {
    case MatrixFormat::kF32:
      return Launch(EmbedKernel<MatrixFormat::kF32>, shape, ctx.stream, kernel);
    case MatrixFormat::kBF16:
      return Launch(EmbedKernel<MatrixFormat::kBF16>, shape, ctx.stream, kernel);
    case MatrixFormat::kQ4_0:
      return Launch(EmbedKernel<MatrixFormat::kQ4_0>, shape, ctx.stream, kernel);
    case MatrixFormat::kQ4_1:
      return Launch(EmbedKernel<MatrixFormat::kQ4_1>, shape, ctx.stream, kernel);
    case MatrixFormat::kQ8_0:
      return Launch(EmbedKernel<MatrixFormat::kQ8_0>, shape, ctx.stream, kernel);
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
      return Launch(EmbedKernel<MatrixFormat::kMxfp4>, shape, ctx.stream, kernel);
  }
}

}  // namespace turbomind::cuda
