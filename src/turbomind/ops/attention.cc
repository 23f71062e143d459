#include "turbomind/ops/attention.h"

#include <algorithm>

#include "turbomind/core/check.h"
#include "turbomind/kv/sliding_window.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {
namespace {

// Checks the blocks that the queries [first, last] of a sequence read in the quantized view.
void CheckQuantizedBlocks(const AttentionParams& p, int seq, int first, int last) {
  const PrecisionWindow& rule = p.rule;
  PositionRange seen = {seq, last + 1, 0};
  for (int position = first; position <= last; ++position) {
    const int begin = std::max(FirstVisible(p.window, position), rule.SinkEnd());
    const int end = rule.RecentBegin(position);
    if (begin < end) {
      seen = {seq, std::min(seen.begin, begin), std::max(seen.end, end)};
    }
  }
  CheckBlocks(p.batch, p.batch.block_tables, seen, p.kv.block_seq_len);
}

void CheckSequence(const AttentionParams& p, int seq) {
  const BatchView& batch = p.batch;
  const int end = batch.context_lens[seq];
  const int first = batch.positions[batch.cu_seqlens[seq]];
  const int begin = FirstVisible(p.window, first);
  const int block_seq_len = p.kv.block_seq_len;
  if (!p.rule.enabled()) {
    CheckBlocks(batch, batch.block_tables, {seq, begin, end}, block_seq_len);
    return;
  }
  CheckQuantizedBlocks(p, seq, first, end - 1);
  const int recent = std::max(begin, p.rule.RecentBegin(first));
  CheckBlocks(batch, batch.window16_tables, {seq, begin, std::min(end, p.rule.SinkEnd())},
              block_seq_len);
  CheckBlocks(batch, batch.window16_tables, {seq, recent, end}, block_seq_len);
}

void CheckFastBias(const FastBias& bias) {
  Check(bias.num_pairs >= 0 && bias.num_pairs <= kMaxFastPairs,
        "num_pairs of the fast bias must be at most kMaxFastPairs");
  Check(bias.num_pairs == 0 || (bias.directions != nullptr && bias.waves_of != nullptr &&
                                bias.waves != nullptr && bias.num_positions % kTileTokens == 0),
        "a fast bias must have directions and waves of whole tiles");
}

void CheckAttention(const AttentionParams& params, int first_seq, int last_seq) {
  CheckLayer(params.kv);
  CheckWindow16Layer(params.kv, params.window16);
  Check((params.window16.data != nullptr) == params.rule.enabled(),
        "there must be a 16-bit pool if and only if the rule is enabled");
  Check(!params.rule.enabled() || params.rule.block_seq_len == params.kv.block_seq_len,
        "the rule must have the layer's block_seq_len");
  Check(!params.rule.enabled() || params.rule.SinkEnd() % kTileTokens == 0,
        "the sinks must end at a tile boundary");
  CheckBatch(params.batch);
  Check(params.q != nullptr && params.out != nullptr, "q and out must be set");
  Check(params.q_heads > 0 && params.q_heads % params.kv.kv_heads == 0,
        "q_heads must be a multiple of kv_heads");
  Check(params.q_stride >= static_cast<int64_t>(params.q_heads) * params.kv.head_dim,
        "q_stride must cover all heads");
  Check(params.score_cap >= 0.f, "score_cap must not be negative");
  Check(params.score_cap == 0.f || params.q_dot_mean == nullptr,
        "a layer with a score cap must not subtract the mean of K");
  CheckFastBias(params.fast_bias);
  for (int seq = first_seq; seq < last_seq; ++seq) {
    CheckSequence(params, seq);
    Check(params.fast_bias.num_pairs == 0 ||
              params.batch.context_lens[seq] <= params.fast_bias.num_positions,
          "the waves of the fast bias must cover the context");
  }
}

}  // namespace

void invokePrefillAttention(Device& device, const AttentionParams& params) {
  CheckAttention(params, params.batch.num_decode, params.batch.num_seqs);
  if (params.batch.num_decode < params.batch.num_seqs) {
    device.PrefillAttention(params);
  }
}

void dispatchDecoding(Device& device, const AttentionParams& params) {
  CheckAttention(params, 0, params.batch.num_decode);
  if (params.batch.num_decode > 0) {
    device.DecodeAttention(params);
  }
}

}  // namespace turbomind
