#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/kv/layer_group.h"

namespace turbomind {

// How long and how many sequences are; what a budget is shared by.
struct KvDemand {
  int64_t session_len = 0;
  int64_t chunk = 0;          // new tokens of one step at most
  int64_t max_sequences = 0;  // never more blocks than these need; 0: no such limit
  // Sequences that run at once: the 16-bit pools have room for so many, if short ones, as far as a
  // quarter of the budget goes. 0: only for the long ones that fit.
  int64_t num_running = 0;
};

// Pools are numbered as in KvCache: quantized ones of all groups, then, where there is a 16-bit
// window, 16-bit ones.

// Bytes of a block, data and scales, by pool.
std::vector<int64_t> BlockBytes(const std::vector<LayerGroup>& groups);

// Blocks that `num_sequences` sequences of session_len need in each pool, at most, while they share
// the chunk. Saturates.
std::vector<int64_t> BlocksForSequences(const std::vector<LayerGroup>& groups,
                                        int64_t num_sequences, const KvDemand& demand);

// Blocks of each pool for a budget in bytes: shared so that the same number of sequences of
// session_len fits in every pool, chunk blocks of the 16-bit pools counted once and not per
// sequence. One pool: floor(budget / bytes_per_block). Computed before anything is allocated; a
// pool may get 0.
std::vector<int64_t> BlocksForBudget(const std::vector<LayerGroup>& groups, int64_t budget_bytes,
                                     const KvDemand& demand);

// The same for a given number of quantized blocks of the first group (full attention, where there
// is one). The 16-bit pools come on top: room for the longest sequence that fits the quantized
// blocks, run alone; for as many of session_len as fit; and for num_running short ones, as far as
// num_blocks goes.
std::vector<int64_t> BlocksForCount(const std::vector<LayerGroup>& groups, int64_t num_blocks,
                                    const KvDemand& demand);

// Whether pools of so many blocks hold one sequence of `num_tokens`, computed `chunk` tokens at a
// time.
bool HoldSequence(const std::vector<LayerGroup>& groups, const std::vector<int64_t>& blocks,
                  int64_t num_tokens, int64_t chunk);

}  // namespace turbomind
