#include <algorithm>
#include <string>

#include "turbomind/backend/cuda/latent/latent_attention.cuh"
#include "turbomind/backend/cuda/latent/latent_combine.cuh"
#include "turbomind/backend/cuda/latent/latent_ops.h"
#include "turbomind/backend/cuda/latent/latent_rotate.cuh"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr int kMinPart = 256;  // positions from which on a partial result pays off
constexpr int kMaxParts = 32;

// A kernel with its shape. `rows` is the number of rows of a block.
struct LatentVariant {
  void (*kernel)(LatentParams) = nullptr;
  int rows = 0;
  size_t shared_bytes = 0;
  int blocks_per_sm = 1;
};

template <class C>
LatentVariant VariantOf(const LatentParams& params) {
  return {&LatentKernel<C>, C::kRows, static_cast<size_t>(C::SharedBytes(params.views)),
          C::kRows == 16 ? 2 : 1};
}

// Choose the kernel with the most rows, as far as a sequence has them and as shared memory allows.
// A deterministic device always uses the same one.
template <DataType T, int kRank>
LatentVariant ChooseRows(const Context& context, const LatentParams& params, int64_t max_rows) {
  const auto fits = [&](const LatentVariant& variant) {
    return variant.shared_bytes <= context.gpu.shared_bytes_per_block;
  };
  const auto many = VariantOf<LatentKernelConfig<T, kRank, 64, 32>>(params);
  if (fits(many) && (context.deterministic || max_rows > 16)) {
    return many;
  }
  const auto few = VariantOf<LatentKernelConfig<T, kRank, 16, 32>>(params);
  return fits(few) ? few : VariantOf<LatentKernelConfig<T, kRank, 16, 16>>(params);
}

LatentVariant ChooseVariant(const Context& context, const LatentParams& params, int64_t max_rows) {
  const KvLayerView& kv = params.views[0];
  const bool bfloat = kv.format[0] == KvCacheMode::kNone && kv.format[1] == KvCacheMode::kNone &&
                      kv.dtype == DataType::kBFloat16;
  constexpr int kSmallRank = 256;
  if (kv.head_dim <= kSmallRank) {
    return bfloat ? ChooseRows<DataType::kBFloat16, kSmallRank>(context, params, max_rows)
                  : ChooseRows<DataType::kFloat16, kSmallRank>(context, params, max_rows);
  }
  return bfloat ? ChooseRows<DataType::kBFloat16, kMaxLatentDim>(context, params, max_rows)
                : ChooseRows<DataType::kFloat16, kMaxLatentDim>(context, params, max_rows);
}

LatentParams ParamsOf(const LatentAttentionParams& op) {
  LatentParams params;
  params.q = op.rotate ? op.out : op.q;
  params.q_stride = op.q_stride;
  params.q_rotary = op.q_rotary;
  params.q_rotary_stride = op.q_rotary_stride;
  params.q_rotary_head_stride = op.q_rotary_head_stride;
  params.out = op.out;
  params.q_heads = op.q_heads;
  params.softmax_scale = op.softmax_scale;
  params.views[0] = op.kv;
  params.views[1] = op.window16;
  params.block_tables[0] = op.batch.block_tables;
  params.block_tables[1] = op.batch.window16_tables;
  params.block_table_stride = op.batch.block_table_stride;
  params.rule = op.rule;
  params.cu_seqlens = op.batch.cu_seqlens;
  params.context_lens = op.batch.context_lens;
  return params;
}

// Rotate `from` [num_tokens, q_heads, rank] to the output's rows from `first_token` on.
void RotateToOutput(const Context& context, const LatentAttentionParams& op, const float* from,
                    int first_token, int num_tokens) {
  const int64_t begin = first_token * op.q_stride;
  const RotateLatentsParams params = {.from = from + begin,
                                      .to = op.out + begin,
                                      .stride = op.q_stride,
                                      .num_rows = int64_t{num_tokens} * op.q_heads,
                                      .q_heads = op.q_heads,
                                      .rank = op.kv.head_dim};
  Launch(params.rank <= 256 ? &RotateLatentsKernel<2> : &RotateLatentsKernel<4>,
         {.grid_x = CeilDiv(params.num_rows, int64_t{kRotateWarps}), .threads = 32 * kRotateWarps},
         context.stream, params);
}

// Give the launch memory for the partial results of `num_partials`.
void SetPartials(const Context& context, int64_t num_partials, LatentParams* params) {
  const int64_t rows = num_partials * params->q_heads;
  const int rank = params->views[0].head_dim;
  params->partial_o = static_cast<float*>(
      context.workspace->Get(static_cast<size_t>(rows * (rank + 2)) * sizeof(float)));
  params->partial_ml = params->partial_o + rows * rank;
}

// Merge the partial results of tokens from params.first_token on, and rotate the sums back.
void Combine(const Context& context, const LatentParams& params, int num_tokens,
             const int32_t* first_partial, bool rotate) {
  const int rank = params.views[0].head_dim;
  const LatentCombineParams combine = {.partial_o = params.partial_o,
                                       .partial_ml = params.partial_ml,
                                       .first_partial = first_partial,
                                       .num_parts = params.num_parts,
                                       .out = params.out + params.first_token * params.q_stride,
                                       .out_stride = params.q_stride,
                                       .num_tokens = num_tokens,
                                       .q_heads = params.q_heads,
                                       .rank = rank,
                                       .rotate = rotate};
  const LaunchShape shape = {
      .grid_x = CeilDiv(int64_t{num_tokens} * params.q_heads, int64_t{kLatentCombineWarps}),
      .threads = 32 * kLatentCombineWarps};
  Launch(rank <= 256 ? &LatentCombineKernel<2> : &LatentCombineKernel<4>, shape, context.stream,
         combine);
}

// Attention of the sequences with one token, in the planner's items.
void RunItems(const Context& context, const DecodePlanner& planner,
              const LatentAttentionParams& op) {
  AttentionParams layer;
  layer.q_heads = op.q_heads;
  layer.kv = op.kv;
  layer.rule = op.rule;
  layer.batch = op.batch;
  const DecodePlanner::Plan& plan = planner.Find(layer);
  LatentParams params = ParamsOf(op);
  const LatentVariant variant = ChooseVariant(context, params, op.q_heads);
  const int64_t blocks = CeilDiv(op.q_heads, variant.rows);
  // The plan's items fill a GPU with other kernels.
  const int64_t slots = TileSlots(context.gpu, variant.shared_bytes, variant.blocks_per_sm);
  params.num_parts =
      static_cast<int>(std::clamp<int64_t>(slots / (plan.num_slots * blocks), 1, kMaxParts));
  const int64_t num_items = plan.num_quantized + plan.num_window16;
  SetPartials(context, num_items * params.num_parts, &params);
  for (const auto& [items, count] : {std::pair{plan.quantized, plan.num_quantized},
                                     std::pair{plan.window16, plan.num_window16}}) {
    const int64_t at_once = kMaxGridY / params.num_parts;
    for (int64_t first = 0; first < count; first += at_once) {
      params.items = items + first;  // items contain the index of their partial result
      Launch(variant.kernel,
             {.grid_x = blocks,
              .grid_y = std::min(count - first, at_once) * params.num_parts,
              .threads = kTileThreads,
              .shared_bytes = variant.shared_bytes},
             context.stream, params);
    }
  }
  Combine(context, params, op.batch.num_decode, plan.first_partial, op.rotate);
}

// Attention of the sequences [first, end), each as a whole or in equal parts.
void RunSequences(const Context& context, const LatentAttentionParams& op, const BatchView& host,
                  int first, int end) {
  LatentParams params = ParamsOf(op);
  params.first_seq = first;
  params.end_seq = end;
  params.first_token = host.cu_seqlens[first];
  int64_t max_rows = 0;
  int longest = 0;
  for (int seq = first; seq < end; ++seq) {
    const int64_t tokens = host.cu_seqlens[seq + 1] - host.cu_seqlens[seq];
    max_rows = std::max(max_rows, tokens * op.q_heads);
    longest = std::max(longest, host.context_lens[seq]);
  }
  const LatentVariant variant = ChooseVariant(context, params, max_rows);
  for (int seq = first; seq < end; ++seq) {
    const int64_t tokens = host.cu_seqlens[seq + 1] - host.cu_seqlens[seq];
    params.num_tiles += static_cast<int>(CeilDiv(tokens * op.q_heads, variant.rows));
  }
  const int num_tokens = host.cu_seqlens[end] - params.first_token;
  const int64_t slots = TileSlots(context.gpu, variant.shared_bytes, variant.blocks_per_sm);
  if (!context.deterministic) {
    const int max_parts = std::clamp(longest / kMinPart, 1, kMaxParts);
    params.num_parts =
        static_cast<int>(std::clamp<int64_t>(slots / params.num_tiles, 1, max_parts));
  }
  if (params.num_parts > 1) {
    SetPartials(context, int64_t{num_tokens} * params.num_parts, &params);
  }
  Launch(variant.kernel,
         {.grid_x = params.num_tiles,
          .grid_y = params.num_parts,
          .threads = kTileThreads,
          .shared_bytes = variant.shared_bytes},
         context.stream, params);
  if (params.num_parts > 1) {
    Combine(context, params, num_tokens, nullptr, op.rotate);
  } else if (op.rotate) {
    RotateToOutput(context, op, op.out, params.first_token, num_tokens);
  }
}

}  // namespace

void RequireLatentKernels(const KvLayerView& layer) {
  if (layer.rotary_dim > kLatentRotary) {
    throw InvalidArgument("CUDA has no kernels for a rotary part of " +
                          std::to_string(layer.rotary_dim) + " values. It must be at most " +
                          std::to_string(kLatentRotary) + ". Use --device cpu.");
  }
  if (layer.dtype == DataType::kFloat32) {
    throw InvalidArgument("CUDA stores latents in 16 bits. Use --dtype float16 or bfloat16.");
  }
}

void CudaLatentAttention(const Context& context, const DecodePlanner& planner,
                         const LatentAttentionParams& params, const BatchView& host) {
  if (params.rotate) {
    // A block reads its queries before it writes its output, so that one array may have both.
    RotateToOutput(context, params, params.q, 0, host.num_tokens);
  }
  const int first = context.deterministic ? 0 : host.num_decode;
  if (first > 0) {
    RunItems(context, planner, params);
  }
  if (first < host.num_seqs) {
    RunSequences(context, params, host, first, host.num_seqs);
  }
}

}  // namespace turbomind::cuda
