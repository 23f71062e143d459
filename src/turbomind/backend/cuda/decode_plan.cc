#include "turbomind/backend/cuda/decode_plan.h"

#include <algorithm>

#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {
namespace {

// Positions of an item with which the GPU is filled once, evenly.
int64_t ItemTokens(const std::vector<DecodeRange>& ranges, int blocks_per_range, int num_slots) {
  if (num_slots <= 0) {
    return kLeastItem;
  }
  int64_t tokens = 0;
  for (const DecodeRange& range : ranges) {
    tokens += range.end - range.begin;
  }
  const int64_t share = CeilDiv(tokens * blocks_per_range, int64_t{num_slots});
  return std::max<int64_t>(CeilDiv(share, kItemGranule) * kItemGranule, kLeastItem);
}

}  // namespace

DecodePlan PlanDecode(const std::vector<DecodeRange>& ranges, int blocks_per_range, int num_slots) {
  const int64_t item_tokens = ItemTokens(ranges, blocks_per_range, num_slots);
  DecodePlan plan;
  plan.first_partial.push_back(0);
  for (size_t i = 0; i < ranges.size(); ++i) {
    const DecodeRange& range = ranges[i];
    for (int begin = range.begin; begin < range.end;) {
      const int64_t aligned = int64_t{begin} / kItemGranule * kItemGranule;
      int64_t end = aligned + item_tokens + (aligned < begin ? kItemGranule : 0);
      end = range.end - end < kLeastItem ? range.end : end;
      plan.items.push_back({static_cast<int32_t>(i), begin, static_cast<int32_t>(end),
                            static_cast<int32_t>(plan.items.size())});
      begin = static_cast<int>(end);
    }
    plan.first_partial.push_back(static_cast<int32_t>(plan.items.size()));
  }
  return plan;
}

}  // namespace turbomind::cuda
