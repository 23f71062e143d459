#include "turbomind/ops/attention.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {
namespace {

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
  CheckRule(params.kv, params.window16, params.rule);
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
    CheckReads({params.batch, params.rule, params.window, params.kv.block_seq_len}, seq);
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
