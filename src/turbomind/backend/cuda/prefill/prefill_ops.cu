#include <algorithm>
#include <vector>

#include "turbomind/backend/cuda/kv/kv_ops.h"
#include "turbomind/backend/cuda/prefill/prefill_launch.h"
#include "turbomind/backend/cuda/prefill/prefill_ops.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

static_assert(2 * kMaxPrefillSequences <= kMaxFlattenSpans);  // sinks and recent, per sequence

constexpr int64_t kAlignment = 256;

constexpr int kMinSplit = 512;  // positions from which on a partial result pays off

// The sequences of one launch, and their rows in the two views.
struct Group {
  std::vector<PrefillSequence> sequences;  // first_tile is not set
  std::vector<FlattenSpan> spans[2];       // of the layer's pool and of the 16-bit window
  int64_t num_rows[2] = {0, 0};
  int heads_at_once = 0;
  int num_splits = 1;

  int64_t num_tokens() const {
    const PrefillSequence& last = sequences.back();
    return last.first_token + last.num_tokens - sequences.front().first_token;
  }
};

int64_t Length(const PositionSpan& span) { return std::max(span.end - span.begin, 0); }

void AddRange(const PositionSpan& span, int seq, int range, Group* group) {
  const int view = range == 0 ? 0 : 1;
  const int64_t length = Length(span);
  const int64_t row = group->num_rows[view];
  Check(row + length <= INT32_MAX, "the rows of a launch must fit 31 bits");
  group->sequences.back().ranges[range] = {span.begin, static_cast<int32_t>(span.begin + length),
                                           static_cast<int32_t>(row)};
  if (length > 0) {
    group->spans[view].push_back({seq, span.begin, static_cast<int32_t>(row)});
    group->num_rows[view] += length;
  }
}

std::vector<Group> MakeGroups(const AttentionParams& p, const BatchView& host,
                              const SequenceRange& sequences, int64_t scratch_bytes) {
  const int64_t row_bytes = int64_t{2} * 2 * p.kv.head_dim;  // K and V of one head
  std::vector<Group> groups;
  int64_t rows = 0;
  for (int seq = sequences.begin; seq < sequences.end; ++seq) {
    const int first_token = host.cu_seqlens[seq];
    const int num_tokens = host.cu_seqlens[seq + 1] - first_token;
    const int context = host.context_lens[seq];
    const SeenSpans spans = SpansOf(p.rule, p.window, context - num_tokens, context);
    const int64_t wanted = Length(spans.quantized) + Length(spans.sinks) + Length(spans.recent);
    if (groups.empty() || groups.back().sequences.size() == kMaxPrefillSequences ||
        (rows + wanted) * row_bytes * p.kv.kv_heads > scratch_bytes) {
      groups.emplace_back();
      rows = 0;
    }
    rows += wanted;
    Group& group = groups.back();
    group.sequences.push_back({0, first_token, num_tokens, context - num_tokens, 0, 0, {}});
    AddRange(spans.quantized, seq, 0, &group);
    AddRange(spans.sinks, seq, 1, &group);
    AddRange(spans.recent, seq, 2, &group);
    const int64_t fitting = scratch_bytes / (rows * row_bytes);
    group.heads_at_once = static_cast<int>(std::clamp<int64_t>(fitting, 1, p.kv.kv_heads));
  }
  return groups;
}

// Split the positions of sequences whose queries alone do not fill the GPU.
void PlanSplits(const Context& context, int q_heads_per_head, Group* group) {
  using Tile = PrefillConfig<DataType::kFloat16, 64, 1>;  // the smallest tile
  int64_t blocks = 0;
  int longest = 0;
  for (PrefillSequence& sequence : group->sequences) {
    const int end = sequence.position + sequence.num_tokens;
    int begin = end;
    for (const DenseRange& range : sequence.ranges) {
      begin = range.begin < range.end ? std::min(begin, range.begin) : begin;
    }
    sequence.split_begin = begin / kPrefillSplitUnit * kPrefillSplitUnit;
    longest = std::max(longest, end - sequence.split_begin);
    blocks += CeilDiv(int64_t{sequence.num_tokens} * q_heads_per_head, Tile::kRows) *
              group->heads_at_once;
  }
  const int64_t slots = int64_t{kPrefillBlocks} * context.gpu.num_sms;
  if (!context.deterministic) {
    const int max_splits = std::clamp(longest / kMinSplit, 1, kMaxPrefillSplits);
    group->num_splits = static_cast<int>(std::clamp<int64_t>(slots / blocks, 1, max_splits));
  }
  for (PrefillSequence& sequence : group->sequences) {
    const int length = sequence.position + sequence.num_tokens - sequence.split_begin;
    sequence.split_len = static_cast<int32_t>(
        CeilDiv(length, kPrefillSplitUnit * group->num_splits) * kPrefillSplitUnit);
  }
}

// Byte offsets of the parts of a group's scratch memory.
struct Scratch {
  int64_t keys[2];
  int64_t values[2];
  int64_t partial_o;
  int64_t partial_ml;
  int64_t end;
};

Scratch LayOut(const Group& group, const AttentionParams& p) {
  Scratch at = {};
  const auto take = [&](int64_t num_bytes) {
    const int64_t begin = at.end;
    at.end += CeilDiv(num_bytes, kAlignment) * kAlignment;
    return begin;
  };
  for (int view = 0; view < 2; ++view) {
    const int64_t bytes = group.num_rows[view] * group.heads_at_once * p.kv.head_dim * 2;
    at.keys[view] = take(bytes);
    at.values[view] = take(bytes);
  }
  if (group.num_splits > 1) {
    const int64_t rows =
        group.num_splits * group.num_tokens() * group.heads_at_once * (p.q_heads / p.kv.kv_heads);
    at.partial_o = take(rows * p.kv.head_dim * 4);
    at.partial_ml = take(rows * 2 * 4);
  }
  return at;
}

// One launch, for a part of the heads.
struct Pass {
  const Context& context;
  const PrefillChoices& choices;
  const AttentionParams& params;
  const Group& group;
  std::byte* scratch;
  int first_head;
  int num_heads;

  DataType type() const {
    return PrefillType(params.kv.format[0], params.kv.format[1], params.kv.dtype);
  }
};

// Return the fast bias of the KV heads from `first` on.
FastBias FromHead(FastBias bias, int first, int head_dim) {
  const int64_t pairs = int64_t{first} * bias.num_pairs;
  if (pairs > 0) {
    bias.directions += pairs * 2 * head_dim;
    bias.waves_of += pairs;
  }
  return bias;
}

// Flatten one view.
DenseView Flatten(const Pass& pass, const Scratch& at, int which) {
  const std::vector<FlattenSpan>& spans = pass.group.spans[which];
  if (spans.empty()) {
    return {};
  }
  const AttentionParams& p = pass.params;
  FlattenHalfParams flatten;
  flatten.k = reinterpret_cast<uint16_t*>(pass.scratch + at.keys[which]);
  flatten.v = reinterpret_cast<uint16_t*>(pass.scratch + at.values[which]);
  flatten.num_rows = pass.group.num_rows[which];
  std::copy(spans.begin(), spans.end(), flatten.spans);
  flatten.num_spans = static_cast<int>(spans.size());
  flatten.kv = (which == 0 ? p.kv : p.window16).Heads(pass.first_head, pass.num_heads);
  flatten.block_tables = which == 0 ? p.batch.block_tables : p.batch.window16_tables;
  flatten.block_table_stride = p.batch.block_table_stride;
  flatten.fast_bias = FromHead(p.fast_bias, pass.first_head, p.kv.head_dim);
  flatten.all_half = pass.type() == DataType::kFloat16;
  CudaFlattenToHalf(pass.context, flatten);
  return {flatten.k, flatten.v, flatten.num_rows};
}

PrefillParams ParamsOf(const Pass& pass) {
  const AttentionParams& p = pass.params;
  PrefillParams out;
  out.q = p.q;
  out.q_stride = p.q_stride;
  out.out = p.out;
  out.sinks = p.sinks;
  out.q_dot_mean = p.q_dot_mean;
  // Flattened keys with an offset or a fast bias include their scale.
  const bool scaled = p.kv.HasKOffset() || p.fast_bias.num_pairs > 0;
  out.key_scale = scaled ? nullptr : p.kv.global_scale[0];
  out.value_scale = p.kv.global_scale[1];
  out.q_heads = p.q_heads;
  out.group = p.q_heads / p.kv.kv_heads;
  out.first_head = pass.first_head;
  out.num_heads = pass.num_heads;
  out.softmax_scale = p.softmax_scale;
  out.score_cap = p.score_cap;
  out.window = p.window;
  out.rule = p.rule;
  out.num_splits = pass.group.num_splits;
  out.num_rows = pass.group.num_tokens() * pass.num_heads * out.group;
  out.num_sequences = static_cast<int>(pass.group.sequences.size());
  std::copy(pass.group.sequences.begin(), pass.group.sequences.end(), out.sequences);
  return out;
}

void RunPass(const Pass& pass) {
  const Scratch at = LayOut(pass.group, pass.params);
  PrefillParams params = ParamsOf(pass);
  params.views[0] = Flatten(pass, at, 0);
  params.views[1] = Flatten(pass, at, 1);
  params.partial_o = reinterpret_cast<float*>(pass.scratch + at.partial_o);
  params.partial_ml = reinterpret_cast<float*>(pass.scratch + at.partial_ml);
  LaunchPrefill(pass.context, pass.choices, pass.type(), pass.params.kv.head_dim, params);
}

}  // namespace

void RunPrefillSequences(const Context& context, const PrefillChoices& choices,
                         const AttentionParams& params, const BatchView& host,
                         const SequenceRange& sequences, int64_t scratch_bytes) {
  const int kv_heads = params.kv.kv_heads;
  std::vector<Group> groups = MakeGroups(params, host, sequences, scratch_bytes);
  int64_t num_bytes = 0;
  for (Group& group : groups) {
    PlanSplits(context, params.q_heads / kv_heads, &group);
    num_bytes = std::max(num_bytes, LayOut(group, params).end);
  }
  if (groups.empty()) {
    return;
  }
  auto* const scratch =
      static_cast<std::byte*>(context.workspace->Get(static_cast<size_t>(num_bytes)));
  for (const Group& group : groups) {
    for (int head = 0; head < kv_heads; head += group.heads_at_once) {
      const int num_heads = std::min(group.heads_at_once, kv_heads - head);
      RunPass({context, choices, params, group, scratch, head, num_heads});
    }
  }
}

}  // namespace turbomind::cuda
