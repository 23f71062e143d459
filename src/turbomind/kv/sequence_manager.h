#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "turbomind/kv/block_manager.h"
#include "turbomind/kv/block_trie.h"
#include "turbomind/kv/kv_cache.h"

namespace turbomind {

// Blocks of one pool by state: free + cached + active = total.
struct BlockCounts {
  int64_t total = 0;
  int64_t free = 0;
  int64_t cached = 0;
  int64_t active = 0;
};

// Sequences and their blocks, in every pool at once (kv_cache.h); data and scales in lockstep,
// since one id addresses both.
//
// The life of a sequence:
//   Create      looks its prompt up in the prefix cache and locks what it finds. The result is how
//               many tokens need not be computed: whole blocks, always fewer than the prompt has.
//   AllocateDataAndScaleBlocks
//               before each step: slots for the tokens that the step will write. All or nothing;
//               cached blocks are evicted when no block is free, least recently used first, 16-bit
//               copies of quantized blocks before any other of their pool. False means that someone
//               has to be preempted: FreeDataAndScaleBlocks on a victim.
//   BlockTable, Moves
//               go into the step's batch.
//   Commit      after the step: K and V of tokens [0, n) are written, the moves are done. Whole
//               blocks enter the prefix cache; blocks that fell behind a window, and 16-bit blocks
//               that have been quantized, are unlocked and become -1 in the table.
//   FreeDataAndScaleBlocks
//               ends it, also for preemption. What was committed stays cached, so that a new
//               Create with the same tokens finds it, until it is evicted.
//
// 16-bit blocks (kv/precision_window.h). Tokens are written to 16-bit blocks. A block gets a
// quantized slot, and is quantized into it, in the first step with a query that sees it quantized;
// its 16-bit slot is given back after that step. Sinks stay in the 16-bit window. With the prefix
// cache a whole block keeps its 16-bit copy as a cached block of the 16-bit pool, evicted on its
// own; a hit is cut to what can be used (prefix_hit.h). A 16-bit block found in both pools is taken
// from both, and not quantized again, unless a block before it has yet to be: a sequence then never
// has more quantized blocks than one that found nothing, and fits wherever that does.
//
// Invariants (CheckIntegrity):
//  1. In each pool free + cached + active = total, and data and scales have exactly `total` blocks.
//  2. A block's users are the sequences that have it in their tables, no more and no less.
//  3. A block is kept if and only if it is in the trie; only written whole blocks are.
//  4. Of the blocks that the next query, at num_written, can see, each that it sees in 16 bits is
//  in the
//     16-bit table, each that it sees quantized in the quantized one alone; one that it is the
//     first to see quantized may be in either. Behind the window there is none. (No 16-bit window:
//     every visible block is in the quantized table.)
//  5. FP4: every scale byte of a block in the trie is one that an encoder stores.
// An unknown id, or one used twice, is our own bug: InternalError. Not thread-safe: the engine
// thread's.
class SequenceManager {
 public:
  // `cache` must outlive the manager.
  SequenceManager(KvCache& cache, bool enable_prefix_caching);
  virtual ~SequenceManager();

  // Starts a sequence; returns the number of tokens found in the prefix cache. `use_prefix_cache`
  // false starts from nothing (prompt logprobs). REQUIRES: the prompt is not empty.
  int64_t Create(uint64_t id, std::span<const int32_t> prompt, bool use_prefix_cache = true);

  // Makes slots for tokens [0, num_tokens) in every pool, and quantized slots for the blocks that a
  // query of [num_written, num_tokens) sees quantized. False, and nothing has changed, when there
  // are not enough free and cached blocks.
  bool AllocateDataAndScaleBlocks(uint64_t id, int64_t num_tokens);

  // K and V of all of `tokens` are written. REQUIRES: slots exist and, where there is a 16-bit
  // window, the last step planned has so many tokens; no fewer than last time, and the same ones.
  void Commit(uint64_t id, std::span<const int32_t> tokens);

  void FreeDataAndScaleBlocks(uint64_t id);

  // Drops everything cached. Running sequences keep their blocks.
  void ClearPrefixCache();

  bool Contains(uint64_t id) const { return sequences_.contains(id); }
  int64_t num_written(uint64_t id) const;  // tokens committed or found in the prefix cache
  // Tokens that Create found but could not use for want of a 16-bit copy (or a quantized one).
  int64_t num_cut(uint64_t id) const;
  // Block ids of a pool by position / block_seq_len; -1 where the block is not in that pool. Tables
  // of one group's pools have the same length. Valid until the next call.
  std::span<const int32_t> BlockTable(uint64_t id, int pool) const;
  // What the step planned last has to quantize; empty after Commit.
  std::span<const PendingQuantization> BlocksToQuantize(uint64_t id, int group) const;

  bool enable_prefix_caching() const { return enable_prefix_caching_; }
  int block_seq_len() const { return cache_.block_seq_len(); }
  int num_pools() const { return static_cast<int>(managers_.size()); }
  BlockCounts counts(int pool) const;
  // Blocks that have ever been used: memory beyond them is untouched.
  int64_t high_water(int pool) const;
  int64_t touched_bytes() const;
  // Blocks that AllocateDataAndScaleBlocks would take in a pool.
  int64_t BlocksNeeded(uint64_t id, int pool, int64_t num_tokens) const;
  // Blocks of a pool that a sequence will still take, at most, until `num_tokens` are written,
  // `chunk` at a time; for planning.
  int64_t BlocksToCome(uint64_t id, int pool, int64_t num_tokens, int64_t chunk) const;

  std::byte* GetBlockPtr(int64_t block, int pool = 0) const;
  std::byte* GetScaleBlockPtr(int64_t block, int pool = 0) const;  // null without FP4

  // Throws InternalError naming a broken invariant. Reads every cached scale byte if asked to.
  void CheckIntegrity(bool check_scale_bytes = true) const;

 protected:
  // Unlocks a block that a sequence no longer uses. Virtual so that a test can plant a leak.
  virtual void UnlockBlock(PoolBlock block);

 private:
  struct Sequence {
    int64_t num_written = 0;
    int64_t num_planned = 0;  // slots of the last step planned, for Commit
    int64_t num_entered = 0;  // whole blocks offered to the trie so far
    int64_t num_cut = 0;
    std::vector<std::vector<int32_t>> tables;  // by pool
    // By group: blocks with a quantized slot that no committed step has written, ascending, and the
    // moves of the last step planned.
    std::vector<std::vector<int64_t>> unquantized;
    std::vector<std::vector<PendingQuantization>> blocks_to_quantize;
  };
  const Sequence& At(uint64_t id) const;
  Sequence& At(uint64_t id);
  // Blocks of a group that need a quantized slot before num_tokens are written, and have none.
  std::vector<int64_t> QuantizedSlotsMissing(const Sequence& sequence, int group,
                                             int64_t num_tokens) const;
  void LockHit(Sequence& sequence, const std::vector<std::vector<int>>& path);
  bool TakeBlocks(const std::vector<int64_t>& needed);
  void MarkServed(const Sequence& sequence);
  const PrecisionWindow& RuleOf(int group) const {
    return cache_.groups()[static_cast<size_t>(group)].rule;
  }
  void PlanQuantization(Sequence& sequence, int group);
  bool FinishQuantization(Sequence& sequence, int group);
  void Enter(const Sequence& sequence, std::span<const int32_t> whole);
  void EvictOldest(int pool);
  void DropFromTrie(const std::vector<PoolBlock>& blocks);
  void TrimQuantized(Sequence& sequence, int group);
  void TrimBehindWindow(Sequence& sequence, int group);
  void Release(Sequence& sequence, int pool, int64_t index);
  void CheckTables(const Sequence& sequence, int group) const;
  void CheckPool(int pool, bool check_scale_bytes) const;

  KvCache& cache_;
  bool enable_prefix_caching_;
  std::vector<BlockManager> managers_;  // by pool
  BlockTrie trie_;
  std::unordered_map<uint64_t, Sequence> sequences_;
  // By pool, of one call: most steps need no block, and then allocate nothing.
  std::vector<int64_t> needed_;
  std::vector<std::vector<int>> taken_;
};

}  // namespace turbomind
