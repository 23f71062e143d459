#include <algorithm>
#include <string>

#include "turbomind/backend/cuda/decode/decode_combine.cuh"
#include "turbomind/backend/cuda/large_head/large_head_attention.cuh"
#include "turbomind/backend/cuda/large_head/large_head_ops.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr int kMinPart = 256;  // positions from which on a partial result pays off
constexpr int kMaxParts = 32;

// A kernel with its shape. `rows` is the number of rows of a block.
struct LargeHeadVariant {
  void (*kernel)(LargeHeadParams) = nullptr;
  int rows = 0;
  size_t shared_bytes = 0;
  int blocks_per_sm = 1;
};

template <class C>
LargeHeadVariant VariantOf(const KvLayerView& kv, const KvLayerView& window16) {
  return {&LargeHeadKernel<C>, C::kRows,
          static_cast<size_t>(std::max(C::SharedBytes(kv), C::SharedBytes(window16))),
          C::kRows == 16 ? 2 : 1};
}

// Choose the kernel with the most rows, as far as a sequence has them and as shared memory allows.
// A deterministic device always uses the same one.
template <DataType T>
LargeHeadVariant ChooseRows(const Context& context, const AttentionParams& op, int64_t max_rows) {
  const auto fits = [&](const LargeHeadVariant& variant) {
    return variant.shared_bytes <= context.gpu.shared_bytes_per_block;
  };
  const auto many = VariantOf<LargeHeadConfig<T, 64, 32>>(op.kv, op.window16);
  if (fits(many) && (context.deterministic || max_rows > 16)) {
    return many;
  }
  const auto few = VariantOf<LargeHeadConfig<T, 16, 32>>(op.kv, op.window16);
  return fits(few) ? few : VariantOf<LargeHeadConfig<T, 16, 16>>(op.kv, op.window16);
}

LargeHeadVariant ChooseVariant(const Context& context, const AttentionParams& op,
                               int64_t max_rows) {
  const bool bfloat =
      PrefillType(op.kv.format[0], op.kv.format[1], op.kv.dtype) == DataType::kBFloat16 &&
      op.fast_bias.num_pairs == 0;  // AddBiasToKeys makes FP16
  return bfloat ? ChooseRows<DataType::kBFloat16>(context, op, max_rows)
                : ChooseRows<DataType::kFloat16>(context, op, max_rows);
}

LargeHeadParams ParamsOf(const AttentionParams& op) {
  LargeHeadParams params;
  params.q = op.q;
  params.q_stride = op.q_stride;
  params.score_cap = op.score_cap;
  params.window = op.window;
  params.rule = op.rule;
  params.fast_bias = op.fast_bias;
  params.views[0] = op.kv;
  params.views[1] = op.window16;
  params.block_tables[0] = op.batch.block_tables;
  params.block_tables[1] = op.batch.window16_tables;
  params.block_table_stride = op.batch.block_table_stride;
  params.cu_seqlens = op.batch.cu_seqlens;
  params.context_lens = op.batch.context_lens;
  params.merge = {.out = op.out,
                  .q_heads = op.q_heads,
                  .head_dim = op.kv.head_dim,
                  .softmax_scale = op.softmax_scale,
                  .sinks = op.sinks,
                  .q_dot_mean = op.q_dot_mean};
  return params;
}

// Give the launch memory for the partial results of `num_partials`.
void SetPartials(const Context& context, int64_t num_partials, LargeHeadParams* params) {
  MergeParams& merge = params->merge;
  const int64_t rows = num_partials * merge.q_heads;
  merge.partial_o = static_cast<float*>(
      context.workspace->Get(static_cast<size_t>(rows * (merge.head_dim + 2)) * sizeof(float)));
  merge.partial_ml = merge.partial_o + rows * merge.head_dim;
  params->writes_partials = true;
}

}  // namespace

void RequireLargeHeadKernels(const KvLayerView& layer, const GpuProperties& gpu) {
  if (layer.dtype == DataType::kFloat32) {
    throw InvalidArgument(
        "dtype", "float32 is not supported on a GPU. Use --dtype bfloat16 or --device cpu.");
  }
  Check(layer.head_dim % 16 == 0 && layer.head_dim <= kMaxHeadDim,
        "head_dim must be a multiple of 16 and at most kMaxHeadDim");
  const int64_t bytes = LargeHeadConfig<DataType::kFloat16, 16, 16>::SharedBytes(layer);
  if (static_cast<size_t>(bytes) > gpu.shared_bytes_per_block) {
    throw InvalidArgument("head_dim", std::to_string(layer.head_dim) + " does not fit " + gpu.name +
                                          ", which has " +
                                          std::to_string(gpu.shared_bytes_per_block) +
                                          " bytes of shared memory per block. It needs " +
                                          std::to_string(bytes) + ". Use --device cpu.");
  }
}

int LargeHeadResidentTiles(const Context& context, const KvLayerView& kv, int group) {
  AttentionParams op;
  op.kv = kv;
  const LargeHeadVariant variant = ChooseVariant(context, op, group);
  const int blocks = BlocksPerSm(reinterpret_cast<const void*>(variant.kernel), kTileThreads,
                                 variant.shared_bytes);
  return std::max(blocks, 1) * HeadTiles(std::min(group, variant.rows));
}

void RunLargeHeadItems(const Context& context, const DecodePlanner::Plan& plan,
                       const AttentionParams& op) {
  LargeHeadParams params = ParamsOf(op);
  const int group = op.q_heads / op.kv.kv_heads;
  const LargeHeadVariant variant = ChooseVariant(context, op, group);
  SetPartials(context, plan.num_quantized + plan.num_window16, &params);
  params.merge.first_partial = plan.first_partial;
  params.arrivals = plan.arrivals;
  const auto launch = [&](int view, const DecodeItem* items, int64_t count) {
    params.item_view = view;
    for (int64_t first = 0; first < count; first += kMaxGridY) {
      params.items = items + first;  // items contain the index of their partial result
      Launch(variant.kernel,
             {.grid_x = op.kv.kv_heads * int64_t{CeilDiv(group, variant.rows)},
              .grid_y = std::min(count - first, kMaxGridY),
              .threads = kTileThreads,
              .shared_bytes = variant.shared_bytes},
             context.stream, params);
    }
  };
  launch(0, plan.quantized, plan.num_quantized);
  launch(1, plan.window16, plan.num_window16);
  if (!plan.schedule.last_merges) {
    LaunchCombine(context, {.merge = params.merge,
                            .num_rows = op.batch.num_decode * op.q_heads,
                            .warps_per_row = plan.warps_per_row});
  }
}

void RunLargeHeadSequences(const Context& context, const AttentionParams& op, const BatchView& host,
                           const SequenceRange& sequences) {
  if (sequences.begin >= sequences.end) {
    return;
  }
  LargeHeadParams params = ParamsOf(op);
  params.first_seq = sequences.begin;
  params.end_seq = sequences.end;
  params.first_token = host.cu_seqlens[sequences.begin];
  const int64_t group = op.q_heads / op.kv.kv_heads;
  int64_t max_rows = 0;
  int longest = 0;
  for (int seq = sequences.begin; seq < sequences.end; ++seq) {
    const int64_t tokens = host.cu_seqlens[seq + 1] - host.cu_seqlens[seq];
    max_rows = std::max(max_rows, tokens * group);
    longest = std::max(longest, host.context_lens[seq]);
  }
  const LargeHeadVariant variant = ChooseVariant(context, op, max_rows);
  for (int seq = sequences.begin; seq < sequences.end; ++seq) {
    const int64_t tokens = host.cu_seqlens[seq + 1] - host.cu_seqlens[seq];
    params.num_tiles += static_cast<int>(CeilDiv(tokens * group, variant.rows));
  }
  const int num_tokens = host.cu_seqlens[sequences.end] - params.first_token;
  if (!context.deterministic) {
    const int64_t slots = TileSlots(context.gpu, variant.shared_bytes, variant.blocks_per_sm);
    const int64_t blocks = int64_t{params.num_tiles} * op.kv.kv_heads;
    const int max_parts = std::clamp(longest / kMinPart, 1, kMaxParts);
    params.num_parts = static_cast<int>(std::clamp<int64_t>(slots / blocks, 1, max_parts));
  }
  if (params.num_parts > 1) {
    SetPartials(context, int64_t{num_tokens} * params.num_parts, &params);
  }
  Launch(variant.kernel,
         {.grid_x = params.num_tiles,
          .grid_y = int64_t{op.kv.kv_heads} * params.num_parts,
          .threads = kTileThreads,
          .shared_bytes = variant.shared_bytes},
         context.stream, params);
  if (params.num_parts > 1) {
    MergeParams merge = params.merge;
    merge.num_parts = params.num_parts;
    merge.out += int64_t{params.first_token} * merge.q_heads * merge.head_dim;
    merge.q_dot_mean +=
        merge.q_dot_mean != nullptr ? int64_t{params.first_token} * merge.q_heads : 0;
    LaunchCombine(context, {.merge = merge, .num_rows = num_tokens * merge.q_heads});
  }
}

}  // namespace turbomind::cuda
