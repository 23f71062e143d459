#include "turbomind/ops/flatten_kv.h"

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"

namespace turbomind {

void invokeFlattenKV_v2(Device& device, const FlattenKVParams& params) {
  CheckLayer(params.kv);
  CheckWindow16Layer(params.kv, params.window16);
  Check((params.window16.data != nullptr) == params.rule.enabled(),
        "the 16-bit pool goes with its rule");
  Check(params.window16.data == nullptr || params.batch.window16_tables != nullptr,
        "window16_tables is set");
  CheckBatch(params.batch);
  Check(params.k != nullptr && params.v != nullptr, "k and v are set");
  for (int seq = 0; seq < params.batch.num_seqs; ++seq) {
    const int end = params.batch.context_lens[seq];
    Check(end <= params.max_len, "max_len covers the context");
    Check((end + params.kv.block_seq_len - 1) / params.kv.block_seq_len <=
              params.batch.block_table_stride,
          "the block table covers the context");
  }
  device.FlattenKV(params);
}

}  // namespace turbomind
