#include <algorithm>
#include <bit>
#include <limits>

#include "turbomind/backend/cuda/decode/decode_amplitudes.cuh"
#include "turbomind/backend/cuda/decode/decode_combine.cuh"
#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/decode/decode_variants.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr size_t kAlignment = 256;

// Return the number of blocks that read one item if each has `heads` query heads.
int BlocksPerItem(int kv_heads, int q_heads, int heads) {
  return kv_heads * static_cast<int>(CeilDiv(q_heads / kv_heads, heads));
}

// Choose the warps per row such that a sequence of average length is merged in one round.
int WarpsPerRow(int64_t num_partials, int num_seqs) {
  const int64_t warps = CeilDiv(num_partials, int64_t{num_seqs} * kCombineAhead);
  const auto max_warps = static_cast<int64_t>(kCombineWarps);
  return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::min(warps, max_warps))));
}

size_t Aligned(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Write the values of `from`, then zeros up to `size` values. Return the number of bytes used.
template <class T>
size_t Put(const std::vector<T>& from, int64_t size, std::byte* to) {
  Check(static_cast<int64_t>(from.size()) <= size, "a plan must fit the space reserved for it");
  auto* values = reinterpret_cast<T*>(to);
  std::fill(std::copy(from.begin(), from.end(), values), values + size, T{});
  return Aligned(static_cast<size_t>(size) * sizeof(T));
}

// Return the number of DecodeParams::arrivals.
int64_t NumArrivals(const DecodePlanner::Plan& plan, int num_seqs) {
  return plan.schedule.last_merges
             ? int64_t{num_seqs} * BlocksPerItem(plan.kv_heads, plan.q_heads, kHeadTile)
             : 0;
}

size_t BytesOf(const DecodePlanner::Plan& plan, int num_seqs) {
  const auto bytes = [](int64_t size, size_t of) {
    return Aligned(static_cast<size_t>(size) * of);
  };
  return bytes(num_seqs + 1, sizeof(int32_t)) + bytes(plan.num_quantized, sizeof(DecodeItem)) +
         bytes(plan.num_window16, sizeof(DecodeItem)) +
         bytes(NumArrivals(plan, num_seqs), sizeof(int32_t));
}

}  // namespace

DecodePlanner::DecodePlanner(const Context& context) : context_(context), bytes_(context.stream) {}

void DecodePlanner::Use(const DecodeUse& use, const DecodeSchedule& schedule) {
  std::erase_if(schedules_, [&](const auto& known) { return known.first == use; });
  schedules_.emplace_back(use, schedule);
  ++num_changes_;
}

DecodeSchedule DecodePlanner::ScheduleOf(const StepGroup& group, int q_heads) const {
  DecodeUse wanted = {LayerRule::Of(group.window, group.rule), q_heads, group.kv_heads, 0};
  DecodeSchedule schedule;
  for (const auto& [use, known] : schedules_) {
    const int best = wanted.min_seqs;
    wanted.min_seqs = use.min_seqs;
    if (use == wanted && use.min_seqs > best && use.min_seqs <= num_seqs_) {
      schedule = known;
    } else {
      wanted.min_seqs = best;
    }
  }
  return schedule;
}

DecodePlanner::Plan DecodePlanner::Measure(const StepGroup& group, int q_heads) const {
  Check(q_heads > 0 && group.kv_heads > 0 && q_heads % group.kv_heads == 0,
        "q_heads must be a positive multiple of kv_heads");
  Check(group.batch.num_decode == num_seqs_, "the groups of a step must share its sequences");
  Plan plan;
  plan.rule = LayerRule::Of(group.window, group.rule);
  plan.q_heads = q_heads;
  plan.kv_heads = group.kv_heads;
  plan.schedule = ScheduleOf(group, q_heads);
  // A block of two head tiles counts as two, because only half as many fit an SM.
  const int slots = plan.schedule.slots_per_sm * plan.schedule.waves * context_.gpu.num_sms /
                    BlocksPerItem(group.kv_heads, q_heads, kHeadTile);
  plan.num_slots = std::max(slots, 1);
  plan.num_quantized = plan.rule.MaxQuantizedItems(num_seqs_, plan.num_slots);
  plan.num_window16 = plan.rule.MaxWindow16Items(num_seqs_, plan.num_slots);
  plan.warps_per_row = WarpsPerRow(plan.num_quantized + plan.num_window16, num_seqs_);
  return plan;
}

size_t DecodePlanner::Write(const StepGroup& group, size_t begin, Plan* plan) {
  const std::span context_lens(group.batch.context_lens, static_cast<size_t>(num_seqs_));
  PlanAttention(context_lens, plan->rule, plan->num_slots, &plan_);
  plan->first_partial = reinterpret_cast<const int32_t*>(bytes_.gpu() + begin);
  begin += Put(plan_.first_partial, num_seqs_ + 1, bytes_.host() + begin);
  plan->quantized = reinterpret_cast<const DecodeItem*>(bytes_.gpu() + begin);
  begin += Put(plan_.quantized(), plan->num_quantized, bytes_.host() + begin);
  plan->window16 = reinterpret_cast<const DecodeItem*>(bytes_.gpu() + begin);
  begin += Put(plan_.window16(), plan->num_window16, bytes_.host() + begin);
  if (plan->schedule.last_merges) {
    Check(std::ranges::count(context_lens, 0) == 0, "a row without items would not be merged");
    plan->arrivals = reinterpret_cast<int32_t*>(bytes_.gpu() + begin);
    begin += Put<int32_t>({}, NumArrivals(*plan, num_seqs_), bytes_.host() + begin);
  }
  return begin;
}

void DecodePlanner::Upload(const StepParams& step) {
  Check(step.num_groups > 0, "a step must have at least one group of layers");
  plans_.clear();
  num_seqs_ = step.groups[0].batch.num_decode;
  if (num_seqs_ == 0) {
    return;
  }
  size_t num_bytes = 0;
  for (int i = 0; i < step.num_groups; ++i) {
    plans_.push_back(Measure(step.groups[i], step.q_heads));
    num_bytes += BytesOf(plans_.back(), num_seqs_);
  }
  bytes_.Reserve(num_bytes);
  size_t used = 0;
  for (int i = 0; i < step.num_groups; ++i) {
    used = Write(step.groups[i], used, &plans_[static_cast<size_t>(i)]);
  }
  bytes_.Upload(used);
}

const DecodePlanner::Plan& DecodePlanner::Find(const AttentionParams& layer) const {
  Check(layer.batch.num_decode == num_seqs_, "the batch must belong to the uploaded step");
  const LayerRule rule = LayerRule::Of(layer.window, layer.rule);
  const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) {
    return plan.rule == rule && plan.q_heads == layer.q_heads && plan.kv_heads == layer.kv.kv_heads;
  });
  Check(found != plans_.end(), "the layer must belong to a group of the uploaded step");
  return *found;
}

namespace {

// A layer's items in one pool.
struct PoolItems {
  const KvLayerView& kv;
  const int32_t* block_tables;
  const DecodeItem* items;
  int64_t num_items;
};

void LaunchItems(const Context& context, const PoolItems& pool, DecodeParams params) {
  if (pool.num_items == 0) {
    return;
  }
  const DecodeVariant variant =
      FindDecodeVariant(pool.kv, params.merge.q_heads / pool.kv.kv_heads, context.gpu);
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  Check(pool.kv.block_bytes <= kLimit && pool.kv.scale_block_bytes <= kLimit,
        "a block must be smaller than 2 GiB");
  params.kv = pool.kv;
  params.block_tables = pool.block_tables;
  for (int64_t first = 0; first < pool.num_items; first += kMaxGridY) {
    params.items = pool.items + first;  // items contain the index of their partial result
    Launch(variant.kernel,
           {.grid_x = BlocksPerItem(pool.kv.kv_heads, params.merge.q_heads, variant.heads),
            .grid_y = std::min(pool.num_items - first, kMaxGridY),
            .threads = variant.threads,
            .shared_bytes = variant.shared_bytes},
           context.stream, params);
  }
}

void LaunchAmplitudes(const Context& context, const AttentionParams& params, float* amplitudes) {
  const int num_rows = params.batch.num_decode * params.q_heads;
  Launch(AmplitudesKernel,
         {.grid_x = CeilDiv(num_rows, kAmplitudeWarps), .threads = 32 * kAmplitudeWarps},
         context.stream,
         AmplitudeParams{.q = params.q,
                         .q_stride = params.q_stride,
                         .num_rows = num_rows,
                         .q_heads = params.q_heads,
                         .group = params.q_heads / params.kv.kv_heads,
                         .head_dim = params.kv.head_dim,
                         .fast_bias = params.fast_bias,
                         .amplitudes = amplitudes});
}

}  // namespace

void LaunchCombine(const Context& context, const CombineParams& params) {
  const int vectors = MergeVectors(params.merge.head_dim);
  Launch(vectors == 1   ? &CombineKernel<1>
         : vectors == 2 ? &CombineKernel<2>
                        : &CombineKernel<4>,
         {.grid_x = CeilDiv(int64_t{params.num_rows} * params.warps_per_row, kCombineWarps),
          .threads = 32 * kCombineWarps,
          .shared_bytes = static_cast<size_t>(CombineSharedBytes(vectors))},
         context.stream, params);
}

void RunDecodeItems(const Context& context, const DecodePlanner::Plan& plan,
                    const AttentionParams& params) {
  const BatchView& batch = params.batch;
  const int head_dim = params.kv.head_dim;
  const int64_t rows = (plan.num_quantized + plan.num_window16) * params.q_heads;
  const int64_t num_amplitudes =
      int64_t{batch.num_decode} * params.q_heads * 2 * params.fast_bias.num_pairs;
  auto* partial_o = static_cast<float*>(context.workspace->Get(
      static_cast<size_t>(rows * (head_dim + 2) + num_amplitudes) * sizeof(float)));
  float* partial_ml = partial_o + rows * head_dim;
  const MergeParams merge = {.partial_o = partial_o,
                             .partial_ml = partial_ml,
                             .first_partial = plan.first_partial,
                             .out = params.out,
                             .q_heads = params.q_heads,
                             .head_dim = head_dim,
                             .softmax_scale = params.softmax_scale,
                             .sinks = params.sinks,
                             .q_dot_mean = params.q_dot_mean};
  DecodeParams decode;
  decode.q = params.q;
  decode.q_stride = params.q_stride;
  decode.score_cap = params.score_cap;
  decode.block_table_stride = batch.block_table_stride;
  decode.merge = merge;
  decode.arrivals = plan.arrivals;
  if (num_amplitudes > 0) {
    decode.fast_bias = params.fast_bias;
    decode.amplitudes = partial_ml + rows * 2;
    LaunchAmplitudes(context, params, partial_ml + rows * 2);
  }
  LaunchItems(context, {params.kv, batch.block_tables, plan.quantized, plan.num_quantized}, decode);
  LaunchItems(context, {params.window16, batch.window16_tables, plan.window16, plan.num_window16},
              decode);
  if (!plan.schedule.last_merges) {
    LaunchCombine(context, {.merge = merge,
                            .num_rows = batch.num_decode * params.q_heads,
                            .warps_per_row = plan.warps_per_row});
  }
}

}  // namespace turbomind::cuda
