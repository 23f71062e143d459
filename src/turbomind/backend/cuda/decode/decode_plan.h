#pragma once

// ⑤⑦ Cuts decode attention into items for the blocks of a GPU. Host code.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/core/ceil_div.h"
#include "turbomind/kv/precision_window.h"

namespace turbomind::cuda {

// Positions [begin, end) of one sequence. If they are equal, the item is empty.
struct alignas(16) DecodeItem {
  int32_t sequence;
  int32_t begin;
  int32_t end;
  int32_t partial;  // index of its partial result
};

// Positions [begin, end) that one query sees; end - begin may be 0.
struct DecodeRange {
  int32_t begin = 0;
  int32_t end = 0;
};

// Invariants:
//  1. The items of a range cover it exactly once. They have the partials [first_partial[i],
//     first_partial[i + 1]), in order of position. item.sequence is the index of the range.
//  2. An item begins at its range's begin or at a multiple of kItemGranule.
//  3. An item that is not its whole range has at least kMinItem positions.
//  4. The longest items come first. The GPU starts items in this order, so the short ones at the
//     ends of shares fill the end of its run time.
//  5. There are at most MaxItems(...) items.
struct DecodePlan {
  std::vector<DecodeItem> items;
  std::vector<int32_t> first_partial;  // [number of ranges + 1]
};

inline constexpr int kItemGranule = 128;  // four warps with a tile each
inline constexpr int kMinItem = 256;      // two tiles per warp: one loads, one is computed
inline constexpr int kItemCost = 64;      // time to begin and end an item, in positions read

// Cut the ranges so that each of `num_slots` gets an equal share of all positions. The GPU runs
// `num_slots` items at once.
void PlanDecode(std::span<const DecodeRange> ranges, int num_slots, DecodePlan* plan);

// Return the maximum number of items for ranges of at most `longest` positions.
constexpr int64_t MaxItems(int64_t num_ranges, int64_t longest, int num_slots) {
  return std::min(num_ranges * CeilDiv(longest, kMinItem), num_ranges + num_slots - 1);
}

// The positions that a layer's queries see. Layers with the same rule share a plan.
struct LayerRule {
  int window = 0;  // as in kv/sliding_window.h
  // Not enabled: all positions are in the quantized pool, and the other members are their defaults.
  PrecisionWindow window16 = {};

  static LayerRule Of(int window, const PrecisionWindow& window16) {
    return {window, window16.enabled() ? window16 : PrecisionWindow{}};
  }
  bool operator==(const LayerRule& other) const;

  // Maximum number of items in a plan for this many sequences of any length.
  int64_t MaxQuantizedItems(int64_t num_seqs, int num_slots) const;
  int64_t MaxWindow16Items(int64_t num_seqs, int num_slots) const;
};

// Decode attention of one step, for the layers with one rule.
//
// The query at position context_len - 1 sees the positions of the sliding window. Positions in
// [SinkEnd(), RecentBegin()) are in the quantized pool, all others in the 16-bit window
// (kv/precision_window.h). The partials of a sequence are those of its quantized items, followed by
// those of its 16-bit items.
struct AttentionPlan {
  std::vector<int32_t> first_partial;  // [num_seqs + 1]
  DecodePlan parts[2];  // quantized and 16-bit; item.sequence is the index in the batch

  const std::vector<DecodeItem>& quantized() const { return parts[0].items; }
  const std::vector<DecodeItem>& window16() const { return parts[1].items; }

  // Kept from plan to plan to reuse their memory: one quantized and two 16-bit ranges per sequence.
  std::vector<DecodeRange> quantized_ranges;
  std::vector<DecodeRange> window16_ranges;
};

// A sequence with an empty context has no items.
void PlanAttention(std::span<const int32_t> context_lens, const LayerRule& rule, int num_slots,
                   AttentionPlan* plan);

}  // namespace turbomind::cuda
