#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "turbomind/kv/block_copies.h"
#include "turbomind/kv/block_manager.h"
#include "turbomind/kv/block_trie.h"
#include "turbomind/kv/checkpoint_rule.h"
#include "turbomind/kv/kv_cache.h"

namespace turbomind {

// Blocks of one pool by state: free + cached + active = total.
struct BlockCounts {
  int64_t total = 0;
  int64_t free = 0;
  int64_t cached = 0;
  int64_t active = 0;
};

// A copy of a sequence's state that the planned step writes. A state before the last token of the
// step is written to a slot in the pool of working states. From there, or from the sequence's own
// slot, it is then copied to a checkpoint.
struct PlannedSave {
  int64_t position = 0;                         // after this many tokens
  int32_t slot = -1;                            // -1: the sequence's own, after the last token
  int32_t checkpoint = -1;                      // -1: it does not enter the prefix cache
  CheckpointKind kind = CheckpointKind::kNone;  // of the checkpoint

  bool operator==(const PlannedSave&) const = default;
};

// Manages sequences and their blocks in all pools at once (kv_cache.h). One id addresses a block's
// data and scales, so both are always handled together.
//
// Life cycle of a sequence:
//   Create      looks up the prompt in the prefix cache and locks the blocks that it finds. The
//               result is the number of tokens that need not be computed. It counts whole blocks
//               and is always less than the prompt's length.
//   AllocateDataAndScaleBlocks
//               reserves, before each step, slots for the tokens that the step will write: all or
//               none. If no block is free, it evicts cached blocks, least recently used first.
//               16-bit copies of quantized blocks go before the other blocks of their pool. False
//               means that a sequence must be preempted: call FreeDataAndScaleBlocks on a victim.
//   BlockTable, BlocksToQuantize
//               describe the sequence in the step's batch.
//   Commit      records, after the step, that K and V of tokens [0, n) are written and the pending
//               quantizations are done. Whole blocks enter the prefix cache. Blocks outside the
//               window and 16-bit blocks that were quantized are unlocked and become -1 in the
//               table.
//   FreeDataAndScaleBlocks
//               ends the sequence, also for preemption. Committed blocks stay cached until they
//               are evicted, so a new Create with the same tokens finds them.
//
// 16-bit window (kv/precision_window.h). Tokens are written to 16-bit blocks. The first step with a
// query that reads a block as quantized gives the block a quantized slot and quantizes it. The
// 16-bit slot is released after that step. Sinks stay in the 16-bit window. With the prefix cache,
// a whole block keeps its 16-bit copy as a cached block of the 16-bit pool, which is evicted
// separately. A hit is cut to its usable part (prefix_hit.h). A block cached in both pools is
// reused in both and is not quantized again. Exception: if an earlier block is still waiting to be
// quantized, only the 16-bit copy is reused. A prefix hit therefore never needs more quantized
// blocks than a miss.
//
// Recurrent layers (kv_cache.h). A sequence holds a working slot from its first planned step until
// it is freed. Its state is that after num_written tokens, except where CheckpointToRestore says
// that the next step must first copy it from a checkpoint. Steps save the state after some blocks
// (checkpoint_rule.h) and after every token of a draft but the last. Commit enters the former into
// the prefix cache, where a checkpoint belongs to the last block before it. It is evicted
// separately, and a hit ends at a checkpoint. If only some tokens of a draft are accepted, the
// sequence goes on with the slot of the save after them. Saves leave a working slot to every
// sequence that has none yet. Those for the prefix cache are taken as far as slots are left; they
// never evict KV. Some are spare and evicted first: those that
// divide a prompt, or end what it has in common with only one other, until a hit uses them; those
// within an answer once it has a later one; and one that a single hit has used, once the prompt of
// that hit has its own. So is either the end of the prompt or of the answer, depending on where the
// next prompts of conversations usually begin: templates may remove the reasoning from an answer.
//
// Invariants (CheckIntegrity):
//  1. In each pool free + cached + active = total, and data and scales have exactly `total` blocks.
//  2. A block's users are exactly the sequences that have it in their tables.
//  3. A block is kept if and only if it is in the trie. Only whole, written blocks are in the trie.
//  4. Consider the blocks that the next query, at num_written, can see. A block that it reads as
//     16-bit is in the 16-bit table. A block that it reads as quantized is in the quantized table
//     only; if it is the first query to do so, the block may be in either table. Blocks outside the
//     sliding window are in neither. Without a 16-bit window, every visible block is in the
//     quantized table.
//  5. FP4: every scale byte of a block in the trie is one that an encoder stores.
//  6. A working slot has one sequence: it is its own or that of a planned save. Those are in order
//     and after num_written. A sequence has a checkpoint to restore if it has written tokens but no
//     slot.
// An unknown or reused id is a bug in the caller and throws InternalError. Not thread-safe: only
// the engine thread may use it.
class SequenceManager {
 public:
  // `cache` and `events`, which may be null, must outlive the manager. `checkpoint_interval` is
  // that of CheckpointRule.
  SequenceManager(KvCache& cache, bool enable_prefix_caching, PrefixEvents* events = nullptr,
                  int64_t checkpoint_interval = 0);
  virtual ~SequenceManager();

  // Creates a sequence. Returns the number of tokens found in the prefix cache. If
  // `use_prefix_cache` is false, the lookup is skipped (prompt logprobs). Only sequences with the
  // same salt share blocks. REQUIRES: the prompt is not empty.
  int64_t Create(uint64_t id, std::span<const int32_t> prompt, bool use_prefix_cache = true,
                 const CacheSalt& salt = {});

  // Reserves slots for tokens [0, num_tokens) in every pool. Also reserves quantized slots for the
  // blocks that a query at a position in [num_written, num_tokens) reads as quantized. Returns
  // false and changes nothing if there are not enough free and cached blocks. The last
  // `num_uncertain` tokens are a draft, of which Commit may get fewer. REQUIRES: a draft follows at
  // least one new token.
  bool AllocateDataAndScaleBlocks(uint64_t id, int64_t num_tokens, int64_t num_uncertain = 0);
  // Returns the longest draft for which there are enough slots of states.
  int64_t MaxUncertain(uint64_t id) const;

  // Records that K and V of all of `tokens` are written. REQUIRES: their slots exist. The tokens
  // extend those of the last call. With a 16-bit window, the last planned step covers them. With
  // recurrent layers, they are those of that step, or all but uncertain ones.
  void Commit(uint64_t id, std::span<const int32_t> tokens);

  void FreeDataAndScaleBlocks(uint64_t id);

  // Returns the number of tokens that Create would find in the prefix cache.
  int64_t CachedTokens(std::span<const int32_t> prompt, const CacheSalt& salt = {}) const;
  // Returns copies of the blocks [first, first + max_blocks) of `tokens`, as far as the prefix
  // cache has them. Blocks of running sequences are included once they are whole.
  std::vector<BlockCopies> ExportBlocks(std::span<const int32_t> tokens, int64_t first,
                                        int64_t max_blocks, const CacheSalt& salt = {}) const;
  // Enters copies of the blocks [first, first + copies.size()) of `tokens` into the prefix cache,
  // as cached blocks. Copies that it has already stay. Returns the number of blocks entered or
  // known: fewer if the blocks before `first` are not cached or the pools are full. Throws
  // InvalidArgument for copies of other sizes (nothing is entered), and for a scale byte that no
  // encoder stores (the blocks before that one are entered). REQUIRES: `tokens` covers the blocks.
  int64_t ImportBlocks(std::span<const int32_t> tokens, int64_t first,
                       std::span<const BlockViews> copies, const CacheSalt& salt = {});

  // Keeps a checkpoint after the first `num_blocks` blocks of a running sequence, because a waiting
  // one begins with them. Has no effect if they are written or there are no recurrent layers.
  void AddBranch(uint64_t id, int64_t num_blocks);

  // Drops all cached blocks. Running sequences keep their blocks.
  void ClearPrefixCache();

  bool Contains(uint64_t id) const { return sequences_.contains(id); }
  int64_t num_written(uint64_t id) const;  // tokens committed or found in the prefix cache
  // Returns the tokens that Create found but could not use because the 16-bit or the quantized copy
  // or the checkpoint was missing.
  int64_t num_cut(uint64_t id) const;
  // Return a sequence's slot in the pool of working states, the checkpoint that the next step must
  // copy there first, and the saves of the planned step, ascending by position. The slots are -1 if
  // there is none. Without recurrent layers there are none of them.
  int32_t StateSlot(uint64_t id) const { return At(id).state.slot; }
  int32_t CheckpointToRestore(uint64_t id) const { return At(id).state.restore; }
  std::span<const PlannedSave> PlannedSaves(uint64_t id) const { return At(id).state.saves; }
  // Returns the block ids of a KV pool, indexed by position / block_seq_len; -1 if the block is not
  // in that pool. Tables of a group's pools have the same length. Valid until the next call.
  std::span<const int32_t> BlockTable(uint64_t id, int pool) const;
  // Returns the pending quantizations of the last planned step; empty after Commit.
  std::span<const PendingQuantization> BlocksToQuantize(uint64_t id, int group) const;

  bool enable_prefix_caching() const { return enable_prefix_caching_; }
  bool has_states() const { return cache_.has_states(); }
  int block_seq_len() const { return cache_.block_seq_len(); }
  int num_pools() const { return static_cast<int>(managers_.size()); }
  BlockCounts counts(int pool) const;
  // Returns the number of blocks that were ever used. Memory beyond them is untouched.
  int64_t high_water(int pool) const;
  int64_t touched_bytes() const;
  // Returns the number of blocks that AllocateDataAndScaleBlocks would take in a pool. Checkpoints
  // do not count.
  int64_t BlocksNeeded(uint64_t id, int pool, int64_t num_tokens) const;
  // Returns the maximum number of blocks of a pool that a sequence will still take until
  // `num_tokens` are written, `chunk` at a time. Used for planning.
  int64_t BlocksToCome(uint64_t id, int pool, int64_t num_tokens, int64_t chunk) const;

  std::byte* GetBlockPtr(int64_t block, int pool = 0) const;
  std::byte* GetScaleBlockPtr(int64_t block, int pool = 0) const;  // null without FP4

  // Throws InternalError that names the broken invariant. `check_scale_bytes` also checks every
  // cached scale byte.
  void CheckIntegrity(bool check_scale_bytes = true) const;

 protected:
  // Unlocks a block that a sequence no longer uses. Virtual so that a test can inject a leak.
  virtual void UnlockBlock(PoolBlock block);

 private:
  // A checkpoint that a sequence has not locked, so that its slot may have another one by now.
  struct CheckpointRef {
    int32_t slot = -1;
    uint64_t serial = 0;
  };
  // What a slot of the pool of checkpoints has.
  struct CheckpointUse {
    uint64_t serial = 0;  // of the checkpoint
    CheckpointKind kind = CheckpointKind::kNone;
    bool has_answer = false;  // of kPrompt: its sequence has one of kAnswer
    int num_hits = 0;
  };
  struct State {
    int32_t slot = -1;
    int32_t restore = -1;
    CheckpointRule rule;
    std::vector<PlannedSave> saves;
    bool is_cut = false;   // the prefix cache has blocks after the one that Create found
    CheckpointRef served;  // the one that Create found
    CheckpointRef prompt;  // that of kPrompt
    CheckpointRef answer;  // the last one of kAnswer
  };
  struct Sequence {
    CacheSalt salt = {};
    int64_t num_written = 0;
    int64_t num_planned = 0;  // slots of the last planned step, for Commit
    int64_t num_entered = 0;  // whole blocks inserted into the trie so far
    int64_t num_cut = 0;
    std::vector<std::vector<int32_t>> tables;  // by pool; those of states are empty between calls
    State state;
    // By group: blocks whose quantized slot no committed step has written, ascending, and the
    // pending quantizations of the last planned step.
    std::vector<std::vector<int64_t>> unquantized;
    std::vector<std::vector<PendingQuantization>> blocks_to_quantize;
  };
  const Sequence& At(uint64_t id) const;
  Sequence& At(uint64_t id);
  // Returns the blocks of a group that need a quantized slot before num_tokens are written and have
  // none.
  std::vector<int64_t> QuantizedSlotsMissing(const Sequence& sequence, int group,
                                             int64_t num_tokens) const;
  void LockHit(Sequence& sequence, const std::vector<std::vector<int>>& path);
  bool TakeBlocks(const std::vector<int64_t>& needed);
  void MarkServed(Sequence& sequence);
  const PrecisionWindow& RuleOf(int group) const {
    return cache_.groups()[static_cast<size_t>(group)].rule;
  }
  void PlanQuantization(Sequence& sequence, int group);
  bool FinishQuantization(Sequence& sequence, int group);
  void Enter(std::span<const int32_t> whole, const std::vector<std::vector<int32_t>>& tables,
             const CacheSalt& salt);
  bool Place(const BlockViews& copies, const std::vector<int>& known,
             std::vector<PoolBlock>& placed);
  int32_t TakeCheckpoint(CheckpointKind kind);
  int64_t SpareStates() const;
  int32_t TakeSpareState();
  void PlanSaves(Sequence& sequence, int64_t num_uncertain);
  void ListCheckpoints(Sequence& sequence, int64_t num_tokens);
  void FinishSaves(Sequence& sequence, int64_t num_planned, int64_t num_tokens);
  void NoteBranch(State& state, const std::vector<std::vector<int>>& path);
  void RankCheckpoint(Sequence& sequence, const PlannedSave& save);
  void RankAnswer(State& state, int32_t checkpoint);
  void MarkServedCheckpoint(State& state);
  CheckpointRef RefTo(int32_t checkpoint) const;
  bool IsCurrent(const CheckpointRef& checkpoint) const;
  void MarkSpareUnlessUsed(const CheckpointRef& checkpoint, int max_hits);
  void ReleaseSaves(Sequence& sequence);
  void ReleaseStates(Sequence& sequence);
  void EvictOldest(int pool);
  void DropFromTrie(const std::vector<PoolBlock>& blocks);
  void TrimQuantized(Sequence& sequence, int group);
  void TrimBehindWindow(Sequence& sequence, int group);
  void Release(Sequence& sequence, int pool, int64_t index);
  void CheckTables(const Sequence& sequence, int group) const;
  void CheckStates(const Sequence& sequence) const;
  void CountUsers(const Sequence& sequence, int pool, std::vector<int>& users) const;
  void CheckPool(int pool, bool check_scale_bytes) const;

  KvCache& cache_;
  bool enable_prefix_caching_;
  std::vector<BlockManager> managers_;  // by pool
  BlockTrie trie_;
  int64_t checkpoint_interval_;
  std::vector<CheckpointUse> checkpoint_uses_;  // by slot
  uint64_t num_checkpoints_taken_ = 0;
  int64_t num_stateful_ = 0;  // sequences that have a working slot
  // Prompts that continued the answer before them, minus those that replaced it; within ±kMaxTrend.
  int answer_trend_ = 0;
  std::unordered_map<uint64_t, Sequence> sequences_;
  // Scratch of one call, by pool. It is kept because most steps need no block and then allocate
  // nothing.
  std::vector<int64_t> needed_;
  std::vector<std::vector<int>> taken_;
};

// Returns the pools of the full-attention group; empty if there is no such group.
std::vector<int> FullPools(const KvCache& cache);

}  // namespace turbomind
