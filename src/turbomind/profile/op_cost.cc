#include "turbomind/profile/op_cost.h"

#include <algorithm>

#include "turbomind/core/ceil_div.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind {
namespace {

constexpr int64_t kFloat = sizeof(float);

// Returns the bytes of one position in one layer: K and V of every head.
int64_t TokenBytes(const KvLayerView& kv) {
  int64_t bytes = 0;
  for (const int side : {0, 1}) {
    bytes += kv.row_bytes[side] + kv.param_bytes[side] + kv.scale_bytes[side];
  }
  return bytes * kv.kv_heads;
}

// Returns the bytes of `positions` positions in one layer, with the K offsets of their blocks.
int64_t PositionBytes(const KvLayerView& kv, int64_t positions) {
  const int64_t offset = kv.head_dim + block::ParamBytes(KvCacheMode::kInt8, kv.dtype);
  const int64_t blocks = kv.HasKOffset() ? CeilDiv(positions, kv.block_seq_len) : 0;
  return positions * TokenBytes(kv) + blocks * offset * kv.kv_heads;
}

// A range of positions. It is empty if end <= begin.
struct Stretch {
  int begin;
  int end;

  int64_t size() const { return std::max(end - begin, 0); }
  Stretch Within(const Stretch& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

// Counts the positions from `begin` on that some query up to `last` reads from the quantized pool.
// Queries read a block from this pool after it has left the 16-bit window.
int64_t QuantizedPositions(const AttentionParams& p, int begin, int last) {
  const int length = p.rule.block_seq_len;
  int64_t count = 0;
  for (int block = p.rule.SinkEnd(); block < p.rule.RecentBegin(last); block += length) {
    const int first_query = block + (p.rule.recent_blocks + 1) * length;
    const int oldest = FirstVisible(p.window, first_query);
    count += Stretch{block, block + length}.Within({std::max(begin, oldest), last + 1}).size();
  }
  return count;
}

// Returns the bytes that queries at [first, last] see. Some positions are in the 16-bit window of
// the first query and in the quantized pool for the last one: they are read twice.
int64_t VisibleBytes(const AttentionParams& p, int first, int last) {
  const int begin = FirstVisible(p.window, first);
  const Stretch seen = {begin, last + 1};
  if (p.window16.data == nullptr || !p.rule.enabled()) {
    return PositionBytes(p.kv, seen.size());
  }
  const int64_t window16 = Stretch{0, p.rule.SinkEnd()}.Within(seen).size() +
                           Stretch{p.rule.RecentBegin(first), last + 1}.Within(seen).size();
  return PositionBytes(p.window16, window16) +
         PositionBytes(p.kv, QuantizedPositions(p, begin, last));
}

OpCost AttentionCost(const AttentionParams& p, int first_seq, int last_seq) {
  OpCost cost;
  int64_t num_tokens = 0;
  for (int seq = first_seq; seq < last_seq; ++seq) {
    const int tokens = p.batch.cu_seqlens[seq + 1] - p.batch.cu_seqlens[seq];
    const int last = p.batch.context_lens[seq] - 1;
    const int first = last + 1 - tokens;
    cost.kv_bytes += VisibleBytes(p, first, last);
    num_tokens += tokens;
  }
  cost.activation_bytes = 2 * num_tokens * p.q_heads * p.kv.head_dim * kFloat;
  return cost;
}

OpCost MultiplyCost(const PackedMatrix& weight, bool has_bias, int64_t num_rows) {
  return {.weight_bytes = weight.num_bytes(),
          .activation_bytes =
              ((has_bias ? weight.rows : 0) + num_rows * weight.cols + num_rows * weight.rows) *
              kFloat};
}

// Returns the bytes of the states of `num_values` values that a step reads and writes.
int64_t StateBytes(const BatchView& batch, const StateBatch& states, int64_t num_values) {
  int64_t count = int64_t{batch.num_seqs} + states.num_saves;
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int tokens = batch.cu_seqlens[seq + 1] - batch.cu_seqlens[seq];
    count += batch.context_lens[seq] > tokens ? 1 : 0;
  }
  return count * num_values * kFloat;
}

OpCost HeadsCost(const StateHeads& p) {
  const int64_t state = int64_t{p.value_heads} * p.key_dim * p.value_dim;
  const int64_t token = 2 * int64_t{p.key_heads} * p.key_dim +
                        int64_t{p.value_heads} * (2 * int64_t{p.value_dim} + 1);
  return {.kv_bytes = StateBytes(p.batch, p.states, state),
          .activation_bytes = (p.batch.num_tokens * token + 2 * p.value_heads) * kFloat};
}

}  // namespace

void OpCost::Add(const OpCost& other) {
  weight_bytes += other.weight_bytes;
  kv_bytes += other.kv_bytes;
  activation_bytes += other.activation_bytes;
}

OpCost CostOf(const EmbedParams& p) {
  return {.weight_bytes = p.num_tokens * (p.table->num_bytes() / p.table->rows),
          .activation_bytes =
              p.num_tokens * (p.table->cols * kFloat + static_cast<int64_t>(sizeof(int32_t)))};
}

OpCost CostOf(const NormParams& p) {
  const int64_t vectors = p.bias != nullptr ? 2 : 1;
  return {.activation_bytes = (2 * int64_t{p.num_rows} + vectors) * p.dim * kFloat};
}

OpCost CostOf(const AddParams& p) { return {.activation_bytes = 3 * p.count * kFloat}; }

OpCost CostOf(const SoftCapParams& p) { return {.activation_bytes = 2 * p.count * kFloat}; }

OpCost CostOf(const LinearParams& p) {
  OpCost cost;
  for (int i = 0; i < p.num_parts; ++i) {
    const PackedMatrix& weight = *p.parts[i].weight;
    OpCost part = MultiplyCost(weight, p.parts[i].bias != nullptr, p.num_rows);
    if (i > 0) {
      part.activation_bytes -= p.num_rows * weight.cols * kFloat;  // x is read once
    }
    if (p.accumulate) {
      part.activation_bytes += p.num_rows * weight.rows * kFloat;
    }
    cost.Add(part);
  }
  return cost;
}

OpCost CostOf(const GatedActivationParams& p) {
  return {.activation_bytes = (p.gated ? 3 : 2) * int64_t{p.num_rows} * p.dim * kFloat};
}

OpCost CostOf(const GroupedLinearParams& p, const int32_t* offsets) {
  OpCost cost;
  for (int i = 0; i < p.num_experts; ++i) {
    const int num_rows = offsets[i + 1] - offsets[i];
    if (num_rows > 0) {
      cost.Add(MultiplyCost(*p.experts[i].weight, p.experts[i].bias != nullptr, num_rows));
    }
  }
  return cost;
}

OpCost CostOf(const RouteExpertsParams& p) {
  return {.activation_bytes = p.num_tokens * (int64_t{p.num_experts} + 2 * p.top_k) * kFloat};
}

OpCost CostOf(const CombineExpertsParams& p) {
  return {.activation_bytes = p.num_tokens * (int64_t{p.top_k} + 2) * p.dim * kFloat};
}

OpCost CostOf(const WriteKvParams& p) {
  const KvLayerView& written = p.window16.data != nullptr ? p.window16 : p.kv;
  const int64_t read_heads = int64_t{p.q_heads} + 2 * int64_t{p.kv.kv_heads};
  const int64_t written_heads = int64_t{p.q_heads} + p.kv.kv_heads;  // V is not written back
  const int64_t tokens = p.batch.num_tokens;
  return {.kv_bytes = tokens * TokenBytes(written),
          .activation_bytes =
              tokens * ((read_heads + written_heads) * p.kv.head_dim + p.rope_dim) * kFloat};
}

OpCost CostOf(const QuantizeBlocksParams& p) {
  const int64_t slots = int64_t{p.num_to_quantize} * p.kv.block_seq_len;
  return {.kv_bytes = PositionBytes(p.window16, slots) + PositionBytes(p.kv, slots)};
}

OpCost CostOf(const FlattenKVParams& p) {
  OpCost cost;
  for (int seq = 0; seq < p.batch.num_seqs; ++seq) {
    const int context = p.batch.context_lens[seq];
    AttentionParams seen;  // a query at the end sees the same positions
    seen.kv = p.kv;
    seen.window16 = p.window16;
    seen.rule = p.rule;
    cost.kv_bytes += VisibleBytes(seen, context - 1, context - 1);
    cost.activation_bytes += 2 * int64_t{context} * p.kv.kv_heads * p.kv.head_dim * kFloat;
  }
  return cost;
}

OpCost PrefillCost(const AttentionParams& p) {
  return AttentionCost(p, p.batch.num_decode, p.batch.num_seqs);
}

OpCost DecodeCost(const AttentionParams& p) { return AttentionCost(p, 0, p.batch.num_decode); }

OpCost CostOf(const ShortConvolutionParams& p) {
  const int64_t weights = p.kernel + (p.bias != nullptr ? 1 : 0);
  const int rows = 2 + (p.in_gate != nullptr ? 1 : 0) + (p.out_gate != nullptr ? 1 : 0);
  return {.kv_bytes = StateBytes(p.batch, p.states, int64_t{p.kernel - 1} * p.channels),
          .activation_bytes = (rows * int64_t{p.batch.num_tokens} + weights) * p.channels * kFloat};
}

OpCost CostOf(const GatedDeltaParams& p) {
  OpCost cost = HeadsCost(p.heads);
  cost.activation_bytes += int64_t{p.heads.batch.num_tokens} * p.heads.value_heads * kFloat;  // b
  return cost;
}

OpCost CostOf(const SelectiveScanParams& p) {
  OpCost cost = HeadsCost(p.heads);
  cost.activation_bytes += p.heads.value_heads * kFloat;  // skip
  return cost;
}

OpCost CostOf(const GatedNormParams& p) {
  const int64_t rows = 3 * int64_t{p.num_rows} + (p.weight != nullptr ? 1 : 0);
  return {.activation_bytes = rows * p.dim * kFloat};
}

OpCost CostOf(const SigmoidGateParams& p) { return {.activation_bytes = 3 * p.count * kFloat}; }

OpCost CopyCost(size_t num_bytes) {
  return {.activation_bytes = 2 * static_cast<int64_t>(num_bytes)};
}

}  // namespace turbomind
