#include "turbomind/ops/latent.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {

void invokeWriteLatents(Device& device, const WriteLatentsParams& params) {
  CheckLayer(params.kv);
  CheckWindow16Layer(params.kv, params.window16);
  CheckBatch(params.batch);
  Check(params.kv.HasLatents(), "the layer must have latents");
  Check(params.q != nullptr && params.rows != nullptr && params.num_nonfinite != nullptr,
        "q, rows and num_nonfinite must be set");
  Check(params.rope_cos != nullptr && params.rope_sin != nullptr, "the angles must be set");
  Check(params.q_heads > 0 && params.nope_dim >= 0, "q must have heads");
  const bool window16 = params.window16.data != nullptr;
  Check(!(window16 ? params.window16 : params.kv).HasKOffset(),
        "latents must be written to a pool without offsets");
  const int32_t* tables = window16 ? params.batch.window16_tables : params.batch.block_tables;
  for (int seq = 0; seq < params.batch.num_seqs; ++seq) {
    const int end = params.batch.context_lens[seq];
    const int new_tokens = params.batch.cu_seqlens[seq + 1] - params.batch.cu_seqlens[seq];
    CheckBlocks(params.batch, tables, {seq, end - new_tokens, end}, params.kv.block_seq_len);
  }
  device.WriteLatents(params);
}

void invokeHeadLinear(Device& device, const HeadLinearParams& params) {
  Check(params.x != nullptr && params.y != nullptr && params.heads != nullptr,
        "x, y and heads must be set");
  Check(params.num_heads > 0 && params.num_rows > 0, "there must be heads and rows");
  const PackedMatrix& first = *params.heads->weight;
  for (int head = 0; head < params.num_heads; ++head) {
    const PackedMatrix& weight = *params.heads[head].weight;
    Check(weight.rows == first.rows && weight.cols == first.cols && weight.format == first.format,
          "the matrices of the heads must share one shape and format");
  }
  Check(params.x_head_stride >= first.cols && params.y_head_stride >= first.rows,
        "the heads of x and of y must not overlap");
  device.HeadLinear(params);
}

void invokeLatentAttention(Device& device, const LatentAttentionParams& params) {
  CheckLayer(params.kv);
  CheckWindow16Layer(params.kv, params.window16);
  CheckRule(params.kv, params.window16, params.rule);
  CheckBatch(params.batch);
  Check(params.kv.HasLatents(), "the layer must have latents");
  Check(params.q != nullptr && params.q_rotary != nullptr && params.out != nullptr,
        "q, q_rotary and out must be set");
  Check(params.q_heads > 0 && params.q_stride >= int64_t{params.q_heads} * params.kv.head_dim &&
            params.q_rotary_head_stride >= params.kv.rotary_dim,
        "q_stride must cover all heads");
  for (int seq = 0; seq < params.batch.num_seqs; ++seq) {
    CheckReads({params.batch, params.rule, 0, params.kv.block_seq_len}, seq);
  }
  device.LatentAttention(params);
}

}  // namespace turbomind
