#include "turbomind/backend/cuda/attention/attention_ops.h"
#include "turbomind/backend/cuda/large_head/large_head_ops.h"

namespace turbomind::cuda {

void CudaDecodeAttention(const Context& context, const DecodePlanner& planner,
                         const AttentionParams& params) {
  if (params.batch.num_decode == 0) {
    return;
  }
  const DecodePlanner::Plan& plan = planner.Find(params);
  if (HasLargeHeads(params.kv)) {
    RunLargeHeadItems(context, plan, params);
  } else {
    RunDecodeItems(context, plan, params);
  }
}

void CudaPrefillAttention(const Context& context, const PrefillChoices& choices,
                          const AttentionParams& params, const BatchView& host,
                          const SequenceRange& sequences, int64_t scratch_bytes) {
  if (HasLargeHeads(params.kv)) {
    RunLargeHeadSequences(context, params, host, sequences);
  } else {
    RunPrefillSequences(context, choices, params, host, sequences, scratch_bytes);
  }
}

}  // namespace turbomind::cuda
