#pragma once

// ⑤⑦ How decode attention is cut into items for the blocks of a GPU. Host code.

#include <cstdint>
#include <vector>

namespace turbomind::cuda {

// Positions [begin, end) of one sequence, not empty.
struct DecodeItem {
  int32_t sequence;
  int32_t begin;
  int32_t end;
  int32_t partial;  // where its results go
};

// Positions [begin, end) that one query sees; end - begin may be 0.
struct DecodeRange {
  int begin = 0;
  int end = 0;
};

// Invariants: the items of a sequence cover its range once, in order, and are those with partials
// [first_partial[i], first_partial[i + 1]); every item begins at the range's begin or at a multiple
// of kItemGranule and has at least kLeastItem positions unless it is its range's last.
struct DecodePlan {
  std::vector<DecodeItem> items;
  std::vector<int32_t> first_partial;  // [num_seqs + 1]
};

inline constexpr int kItemGranule = 128;  // four warps with a tile each
inline constexpr int kLeastItem = 512;

// `blocks_per_range` is the number of blocks that share a range (KV heads times tiles of query
// heads), `num_slots` how many blocks the GPU runs at once. With num_slots 0 items have kLeastItem
// positions: the cut, and so the order of sums, depends on the range alone.
DecodePlan PlanDecode(const std::vector<DecodeRange>& ranges, int blocks_per_range, int num_slots);

}  // namespace turbomind::cuda
