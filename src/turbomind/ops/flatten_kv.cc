#include "turbomind/ops/flatten_kv.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {

void invokeFlattenKV_v2(Device& device, const FlattenKVParams& params) {
  CheckLayer(params.kv);
  CheckWindow16Layer(params.kv, params.window16);
  Check((params.window16.data != nullptr) == params.rule.enabled(),
        "there must be a 16-bit pool if and only if the rule is enabled");
  Check(params.window16.data == nullptr || params.batch.window16_tables != nullptr,
        "window16_tables must be set");
  CheckBatch(params.batch);
  Check(params.k != nullptr && params.v != nullptr, "k and v must be set");
  for (int seq = 0; seq < params.batch.num_seqs; ++seq) {
    const int end = params.batch.context_lens[seq];
    Check(end <= params.max_len, "max_len must cover the context");
    Check((end + params.kv.block_seq_len - 1) / params.kv.block_seq_len <=
              params.batch.block_table_stride,
          "the block table must cover the context");
  }
  device.FlattenKV(params);
}

}  // namespace turbomind
