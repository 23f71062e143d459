#include "turbomind/ops/attention.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {
namespace {

void CheckAttention(const AttentionParams& params, int first_seq, int last_seq) {
  CheckLayer(params.kv);
  CheckBatch(params.batch);
  Check(params.q != nullptr && params.out != nullptr, "q and out are set");
  Check(params.q_heads > 0 && params.q_heads % params.kv.kv_heads == 0,
        "q_heads is a multiple of kv_heads");
  Check(params.q_stride >= static_cast<int64_t>(params.q_heads) * params.kv.head_dim,
        "q_stride covers the heads");
  Check(params.window >= 0, "window is not negative");
  for (int seq = first_seq; seq < last_seq; ++seq) {
    const int end = params.batch.context_lens[seq];
    const int first_query = params.batch.positions[params.batch.cu_seqlens[seq]];
    const int begin =
        params.window > 0 && first_query + 1 > params.window ? first_query + 1 - params.window : 0;
    CheckBlocks(params.batch, params.batch.block_tables, {seq, begin, end},
                params.kv.block_seq_len);
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
