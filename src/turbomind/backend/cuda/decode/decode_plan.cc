#include "turbomind/backend/cuda/decode/decode_plan.h"

#include <limits>

#include "turbomind/kv/sliding_window.h"

namespace turbomind::cuda {
namespace {

int64_t AlignDown(int64_t position) { return position / kItemGranule * kItemGranule; }

// Cuts ranges into items, one range after the other.
class Cutter {
 public:
  explicit Cutter(DecodePlan* plan) : plan_(*plan) {
    plan_.items.clear();
    plan_.first_partial.assign(1, 0);
  }

  void Begin(const DecodeRange& range) { range_ = range; }
  void End() { plan_.first_partial.push_back(static_cast<int32_t>(plan_.items.size())); }
  int64_t left() const { return int64_t{range_.end} - range_.begin; }

  // Return whether a cut at this position leaves enough positions for another item.
  bool LeavesEnough(int64_t cut) const { return range_.end - cut >= kMinItem; }
  void TakeTo(int64_t cut) {
    const auto index = static_cast<int32_t>(plan_.first_partial.size()) - 1;
    const auto partial = static_cast<int32_t>(plan_.items.size());
    plan_.items.push_back({index, range_.begin, static_cast<int32_t>(cut), partial});
    range_.begin = static_cast<int32_t>(cut);
  }
  int64_t begin() const { return range_.begin; }
  int64_t end() const { return range_.end; }

 private:
  DecodePlan& plan_;
  DecodeRange range_;
};

// Arrange all ranges in a line, with an item's cost before each, and cut the line into num_slots
// equal shares. A cut that would leave less than kMinItem on either side is made later or not at
// all.
void CutIntoShares(std::span<const DecodeRange> ranges, int num_slots, Cutter* cutter) {
  int64_t total = int64_t{num_slots} * kItemCost;
  for (const DecodeRange& range : ranges) {
    total += range.end - range.begin + kItemCost;
  }
  const int64_t positions = std::max<int64_t>(CeilDiv(total, num_slots) - kItemCost, kMinItem);
  const int64_t share = CeilDiv(positions, kItemGranule) * kItemGranule + kItemCost;
  int64_t taken = 0;  // length of the line so far
  int64_t slot = 0;
  for (const DecodeRange& range : ranges) {
    cutter->Begin(range);
    while (cutter->left() > 0) {
      const int64_t room = (slot + 1) * share - taken - kItemCost;
      const int64_t cut = AlignDown(cutter->begin() + std::max<int64_t>(room, 0));
      const bool is_last = slot + 1 == num_slots;
      if (is_last || cutter->left() <= room || !cutter->LeavesEnough(cut)) {
        taken += cutter->left() + kItemCost;
        cutter->TakeTo(cutter->end());
        continue;
      }
      if (cut - cutter->begin() >= kMinItem) {
        taken += cut - cutter->begin() + kItemCost;
        cutter->TakeTo(cut);
      }
      ++slot;
    }
    cutter->End();
  }
}

// The positions that the query of a sequence sees.
struct Visible {
  DecodeRange quantized;
  DecodeRange
      window16[2];  // sinks and recent positions; all in the first if nothing is between them
};

Visible VisibleAt(int context, const LayerRule& rule) {
  const int begin = context == 0 ? 0 : FirstVisible(rule.window, context - 1);
  if (!rule.window16.enabled() || context == 0) {
    return {{begin, context}, {}};
  }
  const int sink_end = std::clamp(rule.window16.SinkEnd(), begin, context);
  const int recent = std::clamp(rule.window16.RecentBegin(context - 1), sink_end, context);
  if (sink_end == recent) {
    return {{}, {{begin, context}, {}}};
  }
  return {{sink_end, recent}, {{begin, sink_end}, {recent, context}}};
}

}  // namespace

void PlanDecode(std::span<const DecodeRange> ranges, int num_slots, DecodePlan* plan) {
  Cutter cutter(plan);
  CutIntoShares(ranges, num_slots, &cutter);
  std::sort(plan->items.begin(), plan->items.end(), [](const DecodeItem& a, const DecodeItem& b) {
    const int a_length = a.end - a.begin;
    const int b_length = b.end - b.begin;
    return a_length != b_length ? a_length > b_length : a.partial < b.partial;
  });
}

bool LayerRule::operator==(const LayerRule& other) const {
  return window == other.window && window16.recent_blocks == other.window16.recent_blocks &&
         window16.sink_blocks == other.window16.sink_blocks &&
         window16.block_seq_len == other.window16.block_seq_len;
}

int64_t LayerRule::MaxQuantizedItems(int64_t num_seqs, int num_slots) const {
  if (window16.IsAlwaysInWindow16(window)) {
    return 0;
  }
  const int reach = window != 0 ? WindowReach(window) : std::numeric_limits<int32_t>::max();
  return MaxItems(num_seqs, reach, num_slots);
}

int64_t LayerRule::MaxWindow16Items(int64_t num_seqs, int num_slots) const {
  if (!window16.enabled()) {
    return 0;
  }
  const int64_t recent = int64_t{window16.recent_blocks + 1} * window16.block_seq_len;
  return MaxItems(num_seqs, window16.SinkEnd(), num_slots) + MaxItems(num_seqs, recent, num_slots);
}

void PlanAttention(std::span<const int32_t> context_lens, const LayerRule& rule, int num_slots,
                   AttentionPlan* plan) {
  auto& [quantized, window16] = plan->parts;
  plan->quantized_ranges.clear();
  plan->window16_ranges.clear();
  for (const int32_t context : context_lens) {
    const Visible visible = VisibleAt(context, rule);
    plan->quantized_ranges.push_back(visible.quantized);
    plan->window16_ranges.insert(plan->window16_ranges.end(), visible.window16,
                                 visible.window16 + 2);
  }
  PlanDecode(plan->quantized_ranges, num_slots, &quantized);
  PlanDecode(plan->window16_ranges, num_slots, &window16);
  plan->first_partial.clear();
  for (size_t i = 0; i <= context_lens.size(); ++i) {
    plan->first_partial.push_back(quantized.first_partial[i] + window16.first_partial[2 * i]);
  }
  for (DecodeItem& item : quantized.items) {
    item.partial += window16.first_partial[2 * static_cast<size_t>(item.sequence)];
  }
  for (DecodeItem& item : window16.items) {
    item.sequence /= 2;
    item.partial += quantized.first_partial[static_cast<size_t>(item.sequence) + 1];
  }
}

}  // namespace turbomind::cuda
