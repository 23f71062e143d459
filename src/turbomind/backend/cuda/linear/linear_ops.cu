#include <algorithm>
#include <optional>
#include <span>

#include "turbomind/backend/cuda/dense/dense_ops.h"
#include "turbomind/backend/cuda/linear/cuda_matrix.h"
#include "turbomind/backend/cuda/linear/embed_kernels.cuh"
#include "turbomind/backend/cuda/linear/linear_copy.cuh"
#include "turbomind/backend/cuda/linear/linear_exact.cuh"
#include "turbomind/backend/cuda/linear/linear_expand.cuh"
#include "turbomind/backend/cuda/linear/linear_fp8.h"
#include "turbomind/backend/cuda/linear/linear_ops.h"
#include "turbomind/backend/cuda/linear/linear_stream.cuh"
#include "turbomind/backend/cuda/linear/linear_tile.cuh"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr int64_t kExpandedBytes = int64_t{64} << 20;
// Heads with more rows have a launch each, so that there are few tables of their rows.
constexpr int kMaxHeadRows = 256;

const CudaMatrix& Weight(const LinearPart& part) {
  return static_cast<const CudaMatrix&>(*part.weight);
}

template <class C>
void RunStreamKernel(const Context& ctx, StreamParams params) {
  LinearKernelParams& linear = params.linear;
  const SlotCount slots = CountSlots(linear.num_rows, linear.num_experts, C::kRows);
  linear.slot_is_row = slots.slot_is_row;
  const int outputs = params.up.weight != nullptr ? kTileOutputs : C::kOutputs;
  const LaunchShape shape = {.grid_x = slots.slots,
                             .grid_y = CutOutputs(&linear, outputs),
                             .threads = 32 * params.slices,
                             .shared_bytes = static_cast<size_t>(C::SharedBytes(params.slices))};
  Launch(StreamKernel<C>, shape, ctx.stream, params);
}

// REQUIRES: `kernel` is one of the two forms of StreamKernel.
template <MatrixFormat F>
void RunStream(const Context& ctx, const StreamParams& params, LinearKernel kernel) {
  if (params.linear.num_rows > 8) {
    RunStreamKernel<StreamConfig<F, 2, 2>>(ctx, params);
  } else if (kernel == LinearKernel::kStream2) {
    RunStreamKernel<StreamConfig<F, 2, 1>>(ctx, params);
  } else {
    RunStreamKernel<StreamConfig<F, 1, 1>>(ctx, params);
  }
}

// Use the forms with a norm, or with an activation, or both.
template <MatrixFormat F>
void RunFused(const Context& ctx, const StreamParams& params, bool two_tiles) {
  const bool normed = params.norm.weight != nullptr;
  Check(!normed || params.linear.num_rows <= kMaxFusedNormRows,
        "a fused norm must have at most kMaxFusedNormRows rows");
  if (!normed && params.linear.num_rows > 8) {
    RunStreamKernel<StreamConfig<F, 2, 2>>(ctx, params);
  } else if (!normed) {
    RunStreamKernel<StreamConfig<F, 2, 1>>(ctx, params);
  } else if (two_tiles) {
    RunStreamKernel<StreamConfig<F, 2, 1, true>>(ctx, params);
  } else {
    RunStreamKernel<StreamConfig<F, 1, 1, true>>(ctx, params);
  }
}

// If the kernels cannot read the rows of x as they are, use an aligned copy in the order of y's
// rows.
void AlignX(const Context& ctx, MatrixFormat stored, LinearKernelParams* params) {
  const int padded = NumUnits(stored, params->cols) * UnitCols(stored);
  const bool aligned =
      reinterpret_cast<uintptr_t>(params->x) % 16 == 0 && params->x_stride % 4 == 0;
  if (aligned && params->cols == padded) {
    return;
  }
  auto* copy = static_cast<float*>(
      ctx.workspace->Get(static_cast<size_t>(int64_t{params->num_rows} * padded) * sizeof(float)));
  CopyRows<RowOrder::kFloat>(ctx, *params, padded, copy);
  params->x = copy;
  params->x_stride = padded;
  params->cols = padded;
  params->x_rows = nullptr;
}

template <class C>
void RunTileKernel(const Context& ctx, LinearKernelParams linear, int slices, int64_t outputs) {
  const SlotCount slots = CountSlots(linear.num_rows, linear.num_experts, C::kRows);
  linear.slot_is_row = slots.slot_is_row;
  const int64_t blocks = CutOutputs(&linear, C::kOutputs);
  // If some SM would otherwise have no block, each slice gets its own blocks.
  const bool in_parts = slices > 1 && slots.slots * blocks < ctx.gpu.num_sms;
  const int cols = NumUnits(C::kFormat, linear.cols) * UnitCols(C::kFormat);
  const size_t x_bytes = CeilDiv((int64_t{linear.num_rows} + C::kRows) * cols * 2, 256) * 256;
  const size_t part_bytes =
      in_parts ? static_cast<size_t>(slices * outputs * linear.num_rows) * sizeof(float) : 0;
  char* memory = static_cast<char*>(ctx.workspace->Get(x_bytes + part_bytes));
  CopyRows<RowOrder::kBFloat>(ctx, linear, cols, memory);
  linear.cols = cols;
  TileParams params = {.linear = linear,
                       .x_bfloat = reinterpret_cast<const uint16_t*>(memory),
                       .slices = slices,
                       .slots = slots.slots,
                       .parts = in_parts ? reinterpret_cast<float*>(memory + x_bytes) : nullptr,
                       .part_stride = outputs};
  const LaunchShape shape = {
      .grid_x = slots.slots * (in_parts ? slices : 1),
      .grid_y = blocks,
      .threads = 32 * C::kWarps,
      .shared_bytes = static_cast<size_t>(C::SharedBytes(slices > 1 && !in_parts))};
  Launch(TileKernel<C>, shape, ctx.stream, params);
  if (in_parts) {
    const SlotCount rows = CountSlots(linear.num_rows, linear.num_experts, 1);
    params.linear.slot_is_row = rows.slot_is_row;
    Launch(AddPartsKernel<kAddThreads>,
           {.grid_x = rows.slots,
            .grid_y = CutOutputs(&params.linear, kAddThreads),
            .threads = kAddThreads},
           ctx.stream, params);
  }
}

// Parts of the workspace for products by the library. Weights with scales are expanded first, as
// many tiles of outputs at a time as fit into kExpandedBytes.
struct LibraryMemory {
  int64_t tiles_at_once = 0;
  char* x = nullptr;  // BF16
  char* expanded = nullptr;
  char* library = nullptr;
};

template <MatrixFormat F>
LibraryMemory PlanLibrary(const Context& ctx, const LinearKernelParams& linear) {
  const int64_t row_bytes = int64_t{linear.cols} * 2;
  const int64_t tile_bytes = row_bytes * kTileOutputs;
  int64_t num_tiles = 1;
  for (int i = 0; i < linear.num_segments; ++i) {
    num_tiles = std::max(num_tiles, NumTiles(linear.segments[i].outputs));
  }
  LibraryMemory memory;
  memory.tiles_at_once = num_tiles;
  if constexpr (F != MatrixFormat::kBF16) {
    memory.tiles_at_once =
        std::clamp<int64_t>(kExpandedBytes / tile_bytes, 1, std::min(num_tiles, kMaxGridY));
  }
  const int64_t x_bytes = CeilDiv(linear.num_rows * row_bytes, 256) * 256;
  const int64_t expanded_bytes =
      F == MatrixFormat::kBF16 ? 0 : CeilDiv(memory.tiles_at_once * tile_bytes, 256) * 256;
  memory.x = static_cast<char*>(ctx.workspace->Get(static_cast<size_t>(x_bytes + expanded_bytes) +
                                                   CublasLt::kWorkspaceBytes));
  memory.expanded = memory.x + x_bytes;
  memory.library = memory.expanded + expanded_bytes;
  return memory;
}

// Multiply segment `i` with the library. Return false if the library cannot.
template <MatrixFormat F>
bool MultiplySegment(const Context& ctx, const LinearKernelParams& linear, int i,
                     const LibraryMemory& memory, CublasLt& library) {
  const LinearSegment& segment = linear.segments[i];
  const int64_t tiles = NumTiles(segment.outputs);
  for (int64_t first = 0; first < tiles; first += memory.tiles_at_once) {
    const int64_t first_output = first * kTileOutputs;
    const int64_t count = std::min(memory.tiles_at_once, tiles - first);
    BFloatProduct product;
    product.w = segment.weight + first * TileBytes(F, linear.cols);
    if constexpr (F != MatrixFormat::kBF16) {
      const ExpandParams expand = {static_cast<const char*>(product.w),
                                   reinterpret_cast<uint16_t*>(memory.expanded), linear.cols};
      Launch(ExpandKernel<F>,
             {.grid_x = CeilDiv(linear.cols / UnitCols(F), kExpandWarps),
              .grid_y = count,
              .threads = 32 * kExpandWarps},
             ctx.stream, expand);
      product.w = memory.expanded;
    }
    product.x = memory.x;
    product.factor = segment.factor;
    product.bias = segment.bias == nullptr ? nullptr : segment.bias + first_output;
    product.y = linear.y + segment.first_output + first_output;
    product.y_stride = linear.y_stride;
    product.outputs = std::min(count * kTileOutputs, segment.outputs - first_output);
    product.rows = linear.num_rows;
    product.cols = linear.cols;
    product.accumulate = linear.accumulate;
    if (!library.Multiply(product, memory.library, ctx.stream)) {
      Check(first == 0, "the library must support either all outputs of a matrix or none");
      return false;
    }
  }
  return true;
}

// Multiply as many segments as possible with the library. Return the other segments, with x
// unchanged.
template <MatrixFormat F>
LinearKernelParams RunLibrary(const Context& ctx, const LinearKernelParams& params,
                              CublasLt& library) {
  LinearKernelParams linear = params;
  linear.cols = NumUnits(F, params.cols) * UnitCols(F);
  const LibraryMemory memory = PlanLibrary<F>(ctx, linear);
  CopyRows<RowOrder::kBFloat>(ctx, params, linear.cols, memory.x);
  LinearKernelParams rest = params;
  rest.num_segments = 0;
  for (int i = 0; i < linear.num_segments; ++i) {
    if (!MultiplySegment<F>(ctx, linear, i, memory, library)) {
      rest.segments[rest.num_segments++] = linear.segments[i];
    }
  }
  return rest;
}

template <MatrixFormat F>
void RunTile(const Context& ctx, const LinearKernelParams& params, int slices, int64_t outputs) {
  // Minima, and two scales for a block, leave no registers for more rows.
  if constexpr (!HasMinimum(F) && !SplitsColumns(F)) {
    if (RowsOfMatrix(params.num_rows, params.num_experts) > 32) {
      return RunTileKernel<TileConfig<F, 8>>(ctx, params, slices, outputs);
    }
  }
  RunTileKernel<TileConfig<F, 4>>(ctx, params, slices, outputs);
}

template <MatrixFormat F>
void RunFormat(const Context& ctx, LinearKernelParams params, LinearKernel kernel,
               CublasLt* library) {
  int64_t outputs = 0;
  for (int i = 0; i < params.num_segments; ++i) {
    outputs += params.segments[i].outputs;
  }
  const int slices = NumSlices(F, outputs, params.cols);
  if (kernel == LinearKernel::kTile) {
    return RunTile<F>(ctx, params, slices, outputs);
  }
  if (kernel != LinearKernel::kLibrary) {
    AlignX(ctx, F, &params);
    return RunStream<F>(ctx, {params, slices}, kernel);
  }
  Check(library != nullptr, "only a device with a library may choose it");
  bool expands = true;
  if constexpr (IsFp8(F)) {
    if (LibraryMultipliesFp8({.sm = ctx.gpu.sm, .fp8_activations = ctx.fp8_activations})) {
      params = RunFp8Library(ctx, params, F, *library);
      expands = params.num_segments > 0 && ExpandingIsFaster(params.num_rows, ctx.gpu.sm);
    }
  }
  const LinearKernelParams rest = expands ? RunLibrary<F>(ctx, params, *library) : params;
  for (int i = 0; i < rest.num_segments; ++i) {
    LinearKernelParams one = rest;
    one.num_segments = 1;
    one.segments[0] = rest.segments[i];
    RunTile<F>(ctx, one, slices, one.segments[0].outputs);
  }
}

void RunExact(const Context& ctx, ExactParams params) {
  LinearKernelParams& linear = params.linear;
  const SlotCount slots = CountSlots(linear.num_rows, linear.num_experts, kExactRows);
  linear.slot_is_row = slots.slot_is_row;
  const LaunchShape shape = {.grid_x = slots.slots,
                             .grid_y = CutOutputs(&linear, kExactOutputs),
                             .threads = 32 * kExactWarps,
                             .shared_bytes = kExactSharedBytes};
  Launch(params.norm.weight != nullptr ? ExactLinearKernel<kExactWarps, true>
                                       : ExactLinearKernel<kExactWarps, false>,
         shape, ctx.stream, params);
}

// Return the parameters of a call, without segments.
LinearKernelParams BasicParams(const LinearParams& params) {
  LinearKernelParams kernel;
  kernel.y = params.y;
  kernel.y_stride = params.y_stride;
  kernel.num_rows = params.num_rows;
  kernel.accumulate = params.accumulate;
  kernel.x = params.x;
  kernel.x_stride = params.x_stride;
  return kernel;
}

// Set the segments of a stack whose outputs begin at `column` of y. Return the column after them.
int64_t SetSegments(std::span<const LinearPart> parts, int64_t column, LinearKernelParams* kernel) {
  kernel->cols = static_cast<int>(parts[0].weight->cols);
  kernel->num_segments = 0;
  for (const LinearPart& part : parts) {
    kernel->segments[kernel->num_segments++] = {Weight(part).data(),
                                                part.bias,
                                                0,
                                                static_cast<int32_t>(column),
                                                static_cast<int32_t>(part.weight->rows),
                                                Weight(part).factor};
    column += part.weight->rows;
  }
  return column;
}

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// Return whether the kernel can read x and the norm as they are.
bool CanFuse(const ProjectParams& params) {
  const PackedMatrix& weight = *params.linear.parts[0].weight;
  const NormParams& norm = params.norm;
  const float* x = norm.x != nullptr ? norm.x : params.linear.x;
  const MatrixFormat stored = StoredFormat(weight.format);
  if (NumUnits(stored, weight.cols) * UnitCols(stored) != weight.cols || !IsAligned(x)) {
    return false;
  }
  return norm.x == nullptr ||
         (!norm.centered && norm.bias == nullptr && norm.Stride() == weight.cols &&
          IsAligned(norm.weight) && IsAligned(norm.out));
}

void RunFusedExperts(const Context& ctx, const LinearStack& stack, LinearKernelParams experts,
                     const GatedActivationParams& gate) {
  const int slices = NumSlices(stack.stored, stack.total_outputs(), stack.cols);
  DispatchMatrix(stack.stored, [&]<MatrixFormat F>() {
    if constexpr (F != MatrixFormat::kF32) {
      AlignX(ctx, stack.stored, &experts);
      RunFused<StoredFormat(F)>(ctx, {.linear = experts, .slices = slices, .gate = gate}, true);
    } else {
      throw InternalError("FP32 weights have no fused kernel");
    }
  });
}

void RunFusedLayer(const Context& ctx, const LinearStack& stack, const ProjectParams& params) {
  const LinearParams& linear = params.linear;
  StreamParams stream = {.linear = BasicParams(linear),
                         .slices = NumSlices(stack.stored, stack.total_outputs(), stack.cols)};
  SetSegments({linear.parts, static_cast<size_t>(linear.num_parts)}, 0, &stream.linear);
  if (stack.gated) {
    stream.gate = params.gate;
    stream.up = stream.linear.segments[1];
    stream.linear.num_segments = 1;
  }
  if (stack.normed) {
    stream.linear.x = params.norm.x;
    stream.linear.x_stride = params.norm.Stride();
    stream.norm = {params.norm.weight, params.norm.eps,
                   params.keeps_normed ? params.norm.out : nullptr};
  }
  const bool two_tiles = stack.gated || StreamHasTwoTiles(stack, linear.num_rows);
  DispatchMatrix(stack.stored, [&]<MatrixFormat F>() {
    if constexpr (F != MatrixFormat::kF32) {
      RunFused<StoredFormat(F)>(ctx, stream, two_tiles);
    } else {
      Check(!stack.gated, "FP32 weights must not have a fused activation");
      RunExact(ctx, {stream.linear, stream.norm});
    }
  });
}

}  // namespace

CudaLinear::CudaLinear(std::unique_ptr<CublasLt> library) : library_(std::move(library)) {}

CudaLinear::~CudaLinear() {
  for (auto& [array, table] : tables_) {
    FreeGpu(table.gpu);
  }
  for (auto& [shape, rows] : head_rows_) {
    FreeGpu(rows.gpu);
  }
}

LinearMachine CudaLinear::machine(const Context& ctx) const {
  return {.sm = ctx.gpu.sm,
          .has_library = library_ != nullptr && !ctx.deterministic,
          .has_warp_groups = ctx.has_warp_groups && !ctx.deterministic,
          .fp8_activations = ctx.fp8_activations};
}

size_t CudaLinear::library_version() const { return library_ == nullptr ? 0 : library_->version(); }

LinearKernel CudaLinear::KernelOf(const Context& ctx, const LinearStack& stack,
                                  int64_t num_rows) const {
  const LinearMachine here = machine(ctx);
  return ctx.deterministic ? TableKernel(stack, num_rows, here)
                           : choices_.Find(stack, num_rows, here);
}

void CudaLinear::Run(const Context& ctx, const LinearStack& stack, LinearKernelParams params) {
  LinearKernel kernel = KernelOf(ctx, stack, params.num_rows);
  if (kernel == LinearKernel::kFused) {  // of a call that cannot be fused
    kernel = TableKernel(stack, params.num_rows, machine(ctx));
  }
  if (kernel == LinearKernel::kWide) {
    return RunWide(ctx, stack.stored, params, {}, wide_counters_);
  }
  RunOwn(ctx, stack, params, kernel);
}

void CudaLinear::RunOwn(const Context& ctx, const LinearStack& stack, LinearKernelParams params,
                        LinearKernel kernel) {
  DispatchMatrix(stack.stored, [&]<MatrixFormat F>() {
    if constexpr (F == MatrixFormat::kF32) {
      AlignX(ctx, stack.stored, &params);
      RunExact(ctx, {params});
    } else {
      RunFormat<StoredFormat(F)>(ctx, params, kernel, library_.get());
    }
  });
}

void CudaLinear::Linear(const Context& ctx, const LinearParams& params) {
  LinearKernelParams kernel = BasicParams(params);
  std::span<const LinearPart> rest(params.parts, static_cast<size_t>(params.num_parts));
  int64_t column = 0;
  while (!rest.empty()) {
    const std::span<const LinearPart> parts = rest.first(CountStacked(rest));
    rest = rest.subspan(parts.size());
    column = SetSegments(parts, column, &kernel);
    Run(ctx, StackOf(parts), kernel);
  }
}

void CudaLinear::Project(const Context& ctx, const ProjectParams& params) {
  const bool is_gate = params.gate.out != nullptr && params.gate.gated && !params.gate.interleaved;
  const std::span parts(params.linear.parts, static_cast<size_t>(params.linear.num_parts));
  const std::optional<LinearStack> stack = StackOfCall(parts, params.norm.x != nullptr, is_gate);
  const bool is_fused = stack.has_value() && CanFuse(params) &&
                        KernelOf(ctx, *stack, params.linear.num_rows) == LinearKernel::kFused;
  if (is_fused) {
    RunFusedLayer(ctx, *stack, params);
  } else {
    if (params.norm.x != nullptr) {
      CudaNorm(ctx, params.norm);
    }
    if (stack.has_value()) {
      LinearKernelParams kernel = BasicParams(params.linear);
      SetSegments(parts, 0, &kernel);
      Run(ctx, *stack, kernel);
    } else {
      Linear(ctx, params.linear);
    }
  }
  if (params.gate.out != nullptr && !(is_fused && is_gate)) {
    CudaGatedActivation(ctx, params.gate);
  }
}

void CudaLinear::ForgetExperts(const LinearPart* experts) {
  std::erase_if(tables_, [&](const auto& entry) {
    const bool is_of_array = entry.first.first == experts;
    if (is_of_array) {
      FreeGpu(entry.second.gpu);
    }
    return is_of_array;
  });
}

const ExpertWeight* CudaLinear::TableOf(const Context& ctx, const GroupedLinearParams& params) {
  ExpertTable& table = tables_[{params.experts, params.num_experts}];
  const auto count = static_cast<size_t>(params.num_experts);
  bool same = table.host.size() == count;
  for (size_t i = 0; i < count && same; ++i) {
    same = table.host[i].weight == Weight(params.experts[i]).data() &&
           table.host[i].bias == params.experts[i].bias &&
           table.host[i].factor == Weight(params.experts[i]).factor;
  }
  if (same) {
    return table.gpu;
  }
  Synchronize(ctx.stream);  // nothing reads the old table after this
  if (table.gpu != nullptr) {
    FreeGpu(table.gpu);
    table = {};
  }
  std::vector<ExpertWeight> host(count);
  for (size_t i = 0; i < count; ++i) {
    const CudaMatrix& weight = Weight(params.experts[i]);
    host[i] = {weight.data(), params.experts[i].bias, weight.factor};
  }
  table.gpu = static_cast<ExpertWeight*>(AllocateGpu(count * sizeof(ExpertWeight)));
  table.host = std::move(host);
  CopyBytes(table.gpu, table.host.data(), count * sizeof(ExpertWeight), ctx.stream);
  return table.gpu;
}

LinearKernelParams CudaLinear::KernelParamsOf(const Context& ctx,
                                              const GroupedLinearParams& params) {
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
  return kernel;
}

void CudaLinear::GroupedLinear(const Context& ctx, const GroupedLinearParams& params) {
  Run(ctx, StackOfExperts({params.experts, static_cast<size_t>(params.num_experts)}),
      KernelParamsOf(ctx, params));
}

void CudaLinear::GroupedGate(const Context& ctx, const GroupedGateParams& params) {
  const GroupedLinearParams& linear = params.linear;
  LinearStack stack = StackOfExperts({linear.experts, static_cast<size_t>(linear.num_experts)});
  stack.gated = true;
  const LinearKernel kernel = KernelOf(ctx, stack, linear.num_rows);
  LinearKernelParams experts = KernelParamsOf(ctx, linear);
  const bool has_scales = params.activation.row_scales != nullptr;
  if (kernel == LinearKernel::kWide && !has_scales) {
    RunWide(ctx, stack.stored, experts, params.activation, wide_counters_);
    return;
  }
  if (kernel == LinearKernel::kFused && !has_scales) {
    RunFusedExperts(ctx, stack, experts, params.activation);
    return;
  }
  Run(ctx, stack, experts);
  CudaGatedActivation(ctx, params.activation);
}

const CudaLinear::HeadRows& CudaLinear::RowsOf(const Context& ctx, int num_heads, int num_rows,
                                               int x_step) {
  const std::array<int, 3> key = {num_heads, num_rows, x_step};
  if (const auto found = head_rows_.find(key); found != head_rows_.end()) {
    return found->second;
  }
  HeadRows rows;
  for (int head = 0; head < num_heads; ++head) {
    for (int row = 0; row < num_rows; ++row) {
      rows.host.push_back(row * x_step + head);
    }
  }
  for (int head = 0; head <= num_heads; ++head) {
    rows.host.push_back(head * num_rows);
  }
  const size_t bytes = rows.host.size() * sizeof(int32_t);
  rows.gpu = static_cast<int32_t*>(AllocateGpu(bytes));
  const HeadRows& kept = head_rows_[key] = std::move(rows);
  CopyBytes(kept.gpu, kept.host.data(), bytes, ctx.stream);
  return kept;
}

void CudaLinear::HeadLinear(const Context& ctx, const HeadLinearParams& params) {
  if (params.num_rows > kMaxHeadRows || params.x_stride % params.x_head_stride != 0) {
    for (int head = 0; head < params.num_heads; ++head) {
      Linear(ctx, {.x = params.x + head * params.x_head_stride,
                   .x_stride = params.x_stride,
                   .parts = params.heads + head,
                   .num_parts = 1,
                   .y = params.y + head * params.y_head_stride,
                   .y_stride = params.y_stride,
                   .num_rows = params.num_rows});
    }
    return;
  }
  const HeadRows& rows = RowsOf(ctx, params.num_heads, params.num_rows,
                                static_cast<int>(params.x_stride / params.x_head_stride));
  const int num_rows = params.num_rows * params.num_heads;
  LinearKernelParams kernel = KernelParamsOf(ctx, {.x = params.x,
                                                   .x_stride = params.x_head_stride,
                                                   .x_rows = rows.gpu,
                                                   .y = params.y,
                                                   .y_stride = params.y_stride,
                                                   .experts = params.heads,
                                                   .num_experts = params.num_heads,
                                                   .offsets = rows.gpu + num_rows,
                                                   .num_rows = num_rows});
  kernel.expert_rows = params.num_rows;
  kernel.y_expert_stride = params.y_head_stride;
  const LinearStack stack = StackOfExperts({params.heads, static_cast<size_t>(params.num_heads)});
  // The kernels of the table store all outputs with StoreOutput.
  RunOwn(ctx, stack, kernel, TableKernel(stack, num_rows, machine(ctx)));
}

void CudaLinear::Embed(const Context& ctx, const EmbedParams& params) {
  const auto& table = static_cast<const CudaMatrix&>(*params.table);
  const EmbedKernelParams kernel = {table.data(), params.ids,
                                    params.out,   static_cast<int>(table.cols),
                                    table.factor, params.scale};
  const LaunchShape shape = {.grid_x = params.num_tokens,
                             .grid_y = CeilDiv(table.cols, kEmbedThreads * kEmbedCols),
                             .threads = kEmbedThreads};
  DispatchMatrix(table.format, [&]<MatrixFormat F>() {
    Launch(EmbedKernel<StoredFormat(F)>, shape, ctx.stream, kernel);
  });
}

}  // namespace turbomind::cuda
