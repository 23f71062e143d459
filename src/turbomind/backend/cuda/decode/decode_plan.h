#pragma once

// ⑤⑦ How decode attention is cut into items for the blocks of a GPU. Host code.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/core/ceil_div.h"
#include "turbomind/kv/precision_window.h"

namespace turbomind::cuda {

// Positions [begin, end) of one sequence; where they are equal there is nothing to do.
struct alignas(16) DecodeItem {
  int32_t sequence;
  int32_t begin;
  int32_t end;
  int32_t partial;  // where its results go
};

// Positions [begin, end) that one query sees; end - begin may be 0.
struct DecodeRange {
  int32_t begin = 0;
  int32_t end = 0;
};

// Invariants:
//  1. The items of a range cover it once and are those with partials [first_partial[i],
//     first_partial[i + 1]), in order of position. item.sequence is the index of the range.
//  2. An item begins at its range's begin or at a multiple of kItemGranule.
//  3. An item that is not its whole range has at least kMinItem positions.
//  4. The longest items come first: the GPU starts them in this order, and what is cut off at the
//     end of a share fills up the last of its time.
//  5. There are at most MaxItems(...).
struct DecodePlan {
  std::vector<DecodeItem> items;
  std::vector<int32_t> first_partial;  // [number of ranges + 1]
};

inline constexpr int kItemGranule = 128;  // four warps with a tile each
inline constexpr int kMinItem = 256;      // two tiles each: one is loaded while one is computed
inline constexpr int kItemCost = 64;      // positions that are read while an item begins and ends

// Each of `num_slots`, the items that the GPU runs at once, gets an equal share of all positions.
void PlanDecode(std::span<const DecodeRange> ranges, int num_slots, DecodePlan* plan);

// Of ranges of at most `longest` positions.
constexpr int64_t MaxItems(int64_t num_ranges, int64_t longest, int num_slots) {
  return std::min(num_ranges * CeilDiv(longest, kMinItem), num_ranges + num_slots - 1);
}

// The layers that one plan serves: what their queries see.
struct LayerRule {
  int window = 0;                 // 0: full attention
  PrecisionWindow window16 = {};  // not enabled: everything is quantized

  bool operator==(const LayerRule& other) const;

  // Items of a plan for so many sequences of any length.
  int64_t MaxQuantizedItems(int64_t num_seqs, int num_slots) const;
  int64_t MaxWindow16Items(int64_t num_seqs, int num_slots) const;
};

// Decode attention of one step, for the layers of one rule.
//
// The query at position context_len - 1 sees the window's positions: quantized those in
// [SinkEnd(), RecentBegin()), 16-bit the others (kv/precision_window.h). Partials of a sequence:
// those of its quantized items, then of its 16-bit ones.
struct AttentionPlan {
  std::vector<int32_t> first_partial;  // [num_seqs + 1]
  DecodePlan parts[2];                 // quantized and 16-bit; item.sequence is that of the batch

  const std::vector<DecodeItem>& quantized() const { return parts[0].items; }
  const std::vector<DecodeItem>& window16() const { return parts[1].items; }

  // Kept from plan to plan for their memory: one range per sequence, and two.
  std::vector<DecodeRange> quantized_ranges;
  std::vector<DecodeRange> window16_ranges;
};

// A sequence with an empty context has no items.
void PlanAttention(std::span<const int32_t> context_lens, const LayerRule& rule, int num_slots,
                   AttentionPlan* plan);

}  // namespace turbomind::cuda
