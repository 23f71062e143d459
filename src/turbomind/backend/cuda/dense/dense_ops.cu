#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "turbomind/backend/cuda/dense/dense_kernels.cuh"
#include "turbomind/backend/cuda/dense/dense_ops.h"
#include "turbomind/backend/cuda/dense/routing_kernels.cuh"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/ops/rope.h"

namespace turbomind::cuda {
namespace {

// Return whether all rows of `dim` values at these addresses are 16-byte aligned.
bool HasWideRows(int dim, std::initializer_list<const float*> rows) {
  return dim % 4 == 0 && std::all_of(rows.begin(), rows.end(), [](const float* p) {
           return reinterpret_cast<uintptr_t>(p) % 16 == 0;
         });
}

}  // namespace

void CudaFillRope(const Context& ctx, const FillRopeParams& params) {
  const RopeTable& table = *params.table;
  if (!table.enabled()) {
    return;
  }
  const int half = table.dim() / 2;
  const RopeParams rope = {.inv_freq = params.inv_freq,
                           .positions = params.positions,
                           .sets = params.sets,
                           .cos = params.cos,
                           .sin = params.sin,
                           .num_values = int64_t{params.num_tokens} * half,
                           .half = half,
                           .attention_factor = table.attention_factor(),
                           .block_seq_len = params.block_seq_len};
  const LaunchShape shape = {.grid_x = CeilDiv(rope.num_values, kRopeThreads),
                             .threads = kRopeThreads};
  Launch(FillRopeKernel, shape, ctx.stream, rope);
}

void CudaNorm(const Context& ctx, const NormParams& params) {
  const bool wide = HasWideRows(params.dim, {params.x, params.weight, params.out, params.bias}) &&
                    params.stride % 4 == 0;
  const int pieces = params.dim / (wide ? 4 : 1);
  const int num_warps =
      static_cast<int>(std::clamp<int64_t>(CeilDiv(pieces, 32 * kNormHeld), 1, kMaxNormWarps));
  const LaunchShape shape = {.grid_x = params.num_rows,
                             .threads = 32 * num_warps,
                             .shared_bytes = static_cast<size_t>(num_warps) * sizeof(float)};
  Launch(wide ? NormKernel<4> : NormKernel<1>, shape, ctx.stream, NormTask{params, num_warps});
}

void CudaAdd(const Context& ctx, const AddParams& params) {
  Launch(AddKernel, {.grid_x = CeilDiv(params.count, kValueThreads), .threads = kValueThreads},
         ctx.stream, params);
}

void CudaSoftCap(const Context& ctx, const SoftCapParams& params) {
  Launch(SoftCapKernel, {.grid_x = CeilDiv(params.count, kValueThreads), .threads = kValueThreads},
         ctx.stream, params);
}

void CudaGatedActivation(const Context& ctx, const GatedActivationParams& params) {
  const bool wide = HasWideRows(params.dim, {params.gate_up, params.out, params.other}) &&
                    params.other_stride % 4 == 0;
  const LaunchShape shape = {.grid_x = params.num_rows,
                             .grid_y = CeilDiv(params.dim, kGateThreads * (wide ? 4 : 1)),
                             .threads = kGateThreads};
  Launch(wide ? GatedActivationKernel<4> : GatedActivationKernel<1>, shape, ctx.stream, params);
}

void CudaRouteExperts(const Context& ctx, const RouteExpertsParams& params) {
  Launch(RouteExpertsKernel<kRouteWarps>,
         {.grid_x = CeilDiv(params.num_tokens, kRouteWarps), .threads = 32 * kRouteWarps},
         ctx.stream, params);
}

void CudaGroupRows(const Context& ctx, const GroupRowsParams& params) {
  Launch(GroupRowsKernel<kGroupWarps>,
         {.grid_x = params.num_experts,
          .threads = 32 * kGroupWarps,
          .shared_bytes = kGroupSharedBytes},
         ctx.stream, params);
}

void CudaAssignExperts(const Context& ctx, const AssignExpertsParams& params) {
  if (params.route.num_tokens > kMaxAssignedTokens) {
    CudaRouteExperts(ctx, params.route);
    CudaGroupRows(ctx, params.rows);
    return;
  }
  Launch(AssignExpertsKernel<kAssignWarps>, {.threads = 32 * kAssignWarps}, ctx.stream, params);
}

void CudaCombineExperts(const Context& ctx, const CombineExpertsParams& params) {
  const bool wide = HasWideRows(params.dim, {params.y, params.out});
  const LaunchShape shape = {.grid_x = params.num_tokens,
                             .grid_y = CeilDiv(params.dim, kCombineThreads * (wide ? 4 : 1)),
                             .threads = kCombineThreads};
  Launch(wide ? CombineExpertsKernel<4> : CombineExpertsKernel<1>, shape, ctx.stream, params);
}

void CudaArgMaxRows(const Context& ctx, const ArgMaxRowsParams& params) {
  constexpr int64_t kGranule = 16 * kArgMaxThreads;
  constexpr int kBlocksPerSm = 4;
  if (params.num_rows == 0) {
    return;
  }
  const int64_t parts = CeilDiv(kBlocksPerSm * ctx.gpu.num_sms, params.num_rows);
  const int64_t part = CeilDiv(CeilDiv(params.vocab_size, parts), kGranule) * kGranule;
  ArgMaxTask task = {.op = params,
                     .num_parts = static_cast<int>(CeilDiv(params.vocab_size, part)),
                     .part = static_cast<int>(part)};
  const int64_t num_keys = int64_t{params.num_rows} * task.num_parts;
  task.best =
      static_cast<uint64_t*>(ctx.workspace->Get(static_cast<size_t>(num_keys) * sizeof(uint64_t)));
  const bool wide = HasWideRows(params.vocab_size, {params.logits});
  Launch(wide ? ArgMaxPartsKernel<4> : ArgMaxPartsKernel<1>,
         {.grid_x = task.num_parts,
          .grid_y = params.num_rows,
          .threads = kArgMaxThreads,
          .shared_bytes = kArgMaxThreads / 32 * sizeof(uint64_t)},
         ctx.stream, task);
  Launch(ArgMaxRowsKernel<32>, {.grid_x = params.num_rows, .threads = 32}, ctx.stream, task);
}

}  // namespace turbomind::cuda
