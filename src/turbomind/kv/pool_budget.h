#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/kv/layer_group.h"

namespace turbomind {

// The lengths and number of sequences that determine how a budget is shared.
struct KvDemand {
  int64_t session_len = 0;
  int64_t chunk = 0;          // maximum new tokens of one step
  int64_t max_sequences = 0;  // caps the pools at the blocks of this many sequences; 0: no cap
  // Sequences that run at once. The 16-bit pools get room for this many short sequences, up to a
  // quarter of the budget. 0: only for the long sequences that fit.
  int64_t num_running = 0;
};

// Pools are numbered as in KvCache: the quantized pools of all groups, then the 16-bit pools if
// there is a 16-bit window.

// Returns the bytes of a block, data and scales, by pool.
std::vector<int64_t> BlockBytes(const std::vector<LayerGroup>& groups);

// Returns the maximum number of blocks that `num_sequences` sequences of session_len need in each
// pool. They share one chunk per step. Saturates.
std::vector<int64_t> BlocksForSequences(const std::vector<LayerGroup>& groups,
                                        int64_t num_sequences, const KvDemand& demand);

// Returns the blocks of each pool for a budget in bytes. The same number of sequences of
// session_len fits into every pool; the chunk's blocks in the 16-bit pools count once, not per
// sequence. With one pool the result is floor(budget / bytes_per_block). Nothing is allocated yet,
// and a pool may get 0 blocks.
std::vector<int64_t> BlocksForBudget(const std::vector<LayerGroup>& groups, int64_t budget_bytes,
                                     const KvDemand& demand);

// Returns the blocks of each pool for a given number of quantized blocks of the first group (full
// attention if there is one). The 16-bit pools are added on top. They have room for the longest
// sequence that fits into the quantized blocks, run alone, and for as many sequences of session_len
// as fit. They also have room for num_running short sequences, up to num_blocks.
std::vector<int64_t> BlocksForCount(const std::vector<LayerGroup>& groups, int64_t num_blocks,
                                    const KvDemand& demand);

// Returns whether these pools can hold one sequence of `num_tokens` that is computed `chunk` tokens
// at a time.
bool HoldSequence(const std::vector<LayerGroup>& groups, const std::vector<int64_t>& blocks,
                  int64_t num_tokens, int64_t chunk);

}  // namespace turbomind
