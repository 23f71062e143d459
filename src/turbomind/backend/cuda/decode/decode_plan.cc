#include "turbomind/backend/cuda/decode/decode_plan.h"

#include <limits>

#include "turbomind/kv/sliding_window.h"

namespace turbomind::cuda {
namespace {

int64_t AlignDown(int64_t position) { return position / kItemGranule * kItemGranule; }

// Cuts ranges one after the other.
class Cutter {
 public:
  explicit Cutter(DecodePlan* plan) : plan_(*plan) {
    plan_.items.clear();
    plan_.first_partial.assign(1, 0);
  }

  void Begin(const DecodeRange& range) { range_ = range; }
  void End() { plan_.first_partial.push_back(static_cast<int32_t>(plan_.items.size())); }
  int64_t left() const { return int64_t{range_.end} - range_.begin; }

  // Whether the range may be cut at this position.
  bool LeavesEnough(int64_t cut) const { return range_.end - cut >= kLeastItem; }
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

// All ranges in a line, an item's cost before each, cut into num_slots equal shares; a cut that
// would leave less than kLeastItem on one of its sides is made later or not at all.
void CutIntoShares(std::span<const DecodeRange> ranges, int num_slots, Cutter* cutter) {
  int64_t total = int64_t{num_slots} * kItemCost;
  for (const DecodeRange& range : ranges) {
    total += range.end - range.begin + kItemCost;
  }
  const int64_t positions = std::max<int64_t>(CeilDiv(total, num_slots) - kItemCost, kLeastItem);
  const int64_t share = CeilDiv(positions, kItemGranule) * kItemGranule + kItemCost;
  int64_t taken = 0;  // on the line
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
      if (cut - cutter->begin() >= kLeastItem) {
        taken += cut - cutter->begin() + kItemCost;
        cutter->TakeTo(cut);
      }
      ++slot;
    }
    cutter->End();
  }
}

// What the query of a sequence sees.
struct Visible {
  DecodeRange cold;
  DecodeRange hot[2];  // sinks and recent positions; all in the first where nothing is between
};

Visible VisibleAt(int context, const LayerRule& rule) {
  const int begin = FirstVisible(rule.window, context - 1);
  if (!rule.hot.enabled() || context == 0) {
    return {{begin, context}, {}};
  }
  const int sink_end = std::clamp(rule.hot.SinkEnd(), begin, context);
  const int recent = std::clamp(rule.hot.RecentBegin(context - 1), sink_end, context);
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
  return window == other.window && hot.recent_blocks == other.hot.recent_blocks &&
         hot.sink_blocks == other.hot.sink_blocks && hot.block_seq_len == other.hot.block_seq_len;
}

int64_t LayerRule::MostCold(int64_t num_seqs, int num_slots) const {
  if (hot.IsAlwaysHot(window)) {
    return 0;
  }
  return MostItems(num_seqs, window > 0 ? window : std::numeric_limits<int32_t>::max(), num_slots);
}

int64_t LayerRule::MostHot(int64_t num_seqs, int num_slots) const {
  if (!hot.enabled()) {
    return 0;
  }
  const int64_t recent = int64_t{hot.recent_blocks + 1} * hot.block_seq_len;
  return MostItems(num_seqs, hot.SinkEnd(), num_slots) + MostItems(num_seqs, recent, num_slots);
}

void PlanAttention(std::span<const int32_t> context_lens, const LayerRule& rule, int num_slots,
                   AttentionPlan* plan) {
  auto& [cold, hot] = plan->parts;
  plan->cold_ranges.clear();
  plan->hot_ranges.clear();
  for (const int32_t context : context_lens) {
    const Visible visible = VisibleAt(context, rule);
    plan->cold_ranges.push_back(visible.cold);
    plan->hot_ranges.insert(plan->hot_ranges.end(), visible.hot, visible.hot + 2);
  }
  PlanDecode(plan->cold_ranges, num_slots, &cold);
  PlanDecode(plan->hot_ranges, num_slots, &hot);
  plan->first_partial.clear();
  for (size_t i = 0; i <= context_lens.size(); ++i) {
    plan->first_partial.push_back(cold.first_partial[i] + hot.first_partial[2 * i]);
  }
  for (DecodeItem& item : cold.items) {
    item.partial += hot.first_partial[2 * static_cast<size_t>(item.sequence)];
  }
  for (DecodeItem& item : hot.items) {
    item.sequence /= 2;
    item.partial += cold.first_partial[static_cast<size_t>(item.sequence) + 1];
  }
}

}  // namespace turbomind::cuda
