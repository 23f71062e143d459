#include "turbomind/ops/process_kv.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {

void invokeProcessKV_v2(Device& device, const WriteKvParams& params) {
  CheckLayer(params.kv);
  CheckWindow16Layer(params.kv, params.window16);
  CheckBatch(params.batch);
  Check(params.qkv != nullptr && params.num_nonfinite != nullptr,
        "qkv and num_nonfinite must be set");
  Check(params.q_heads > 0 && params.q_heads % params.kv.kv_heads == 0,
        "q_heads must be a multiple of kv_heads");
  Check((params.rope_cos == nullptr) == (params.rope_sin == nullptr),
        "rope_cos and rope_sin must be set together");
  Check(params.rope_cos == nullptr || (params.rope_dim > 0 && params.rope_dim % 2 == 0 &&
                                       params.rope_dim <= params.kv.head_dim),
        "rope_dim must be even and at most head_dim");
  const KvLayerView& written = params.window16.data != nullptr ? params.window16 : params.kv;
  Check((params.k_base != nullptr) == (written.HasKOffset() && !params.only_queries),
        "k_base must be set exactly if the written pool has K offsets");
  Check(
      params.k_base == nullptr || ((params.block_cos != nullptr) == (params.rope_cos != nullptr) &&
                                   (params.block_sin != nullptr) == (params.rope_cos != nullptr)),
      "k_base needs the angles of blocks where there is RoPE");
  const bool window16 = params.window16.data != nullptr;
  const int32_t* tables = window16 ? params.batch.window16_tables : params.batch.block_tables;
  for (int seq = 0; seq < (params.only_queries ? 0 : params.batch.num_seqs); ++seq) {
    const int end = params.batch.context_lens[seq];
    const int new_tokens = params.batch.cu_seqlens[seq + 1] - params.batch.cu_seqlens[seq];
    CheckBlocks(params.batch, tables, {seq, end - new_tokens, end}, params.kv.block_seq_len);
  }
  device.WriteKv(params);
}

}  // namespace turbomind
