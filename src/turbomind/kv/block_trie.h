#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "turbomind/kv/cache_salt.h"
#include "turbomind/kv/prefix_events.h"

namespace turbomind {

// A block of one pool (kv_cache.h).
struct PoolBlock {
  int pool = 0;
  int block = -1;
  bool operator==(const PoolBlock&) const = default;
};

// Layers whose blocks the events report on their own: a node has a block of the group while it has
// one in any of these pools.
struct EventGroup {
  PrefixGroup group;
  std::vector<int> pools;
};

// The prefix cache. It maps token sequences to the blocks that hold their K and V.
//
// A node represents the block_seq_len tokens that follow its parent's tokens. It has one block id
// per pool, or -1 if that pool has no block: it was evicted, is not quantized yet, or was outside
// the window when it was committed. Tokens are compared exactly; there is no hash. The salt is part
// of the first block's key, so that sequences with different salts have no node in common.
//
// Invariants:
//  1. A block is in at most one node.
//  2. If there is a full-attention group, each node has a block in one of its pools. When the last
//     such block is removed, the node's whole subtree is removed, because no hit could use it.
//  3. Otherwise a node without blocks has descendants.
// The trie does not count references: SequenceManager marks the blocks of the trie in its
// BlockManagers. Not thread-safe: only the engine thread may use it.
class BlockTrie {
 public:
  // `full_pools` are the pools of the full-attention group; empty if there is no such group.
  // `events` receives every node that is created or erased; with `event_groups`, every block that a
  // node gains or loses in one of them. It may be null and must outlive the trie.
  BlockTrie(int num_pools, std::vector<int> full_pools, int block_seq_len,
            PrefixEvents* events = nullptr, std::vector<EventGroup> event_groups = {});
  ~BlockTrie();
  BlockTrie(const BlockTrie&) = delete;
  BlockTrie& operator=(const BlockTrie&) = delete;

  // Returns the block ids of the nodes along `tokens`, as far as they are cached: result[i][pool].
  // A partial last block is ignored.
  std::vector<std::vector<int>> Find(std::span<const int32_t> tokens,
                                     const CacheSalt& salt = {}) const;

  // Inserts tables[pool][i] for the i-th whole block of `tokens` and creates nodes as needed.
  // Existing entries are not replaced. Ids of -1 and those beyond the end of a table are skipped.
  // Returns the inserted blocks.
  std::vector<PoolBlock> Insert(std::span<const int32_t> tokens,
                                const std::vector<std::vector<int32_t>>& tables,
                                const CacheSalt& salt = {});

  // Removes a block and every block that cannot stay without it (invariant 2). Returns all removed
  // blocks, `block` included. REQUIRES: Contains(block).
  std::vector<PoolBlock> Remove(PoolBlock block);
  // Removes all blocks and returns them.
  std::vector<PoolBlock> Clear();

  bool Contains(PoolBlock block) const;
  // Returns the block of another pool for the same tokens, or -1 if that pool has none. REQUIRES:
  // Contains(block).
  int Twin(PoolBlock block, int pool) const;
  // Returns how many different blocks follow that of a node that Find returned. REQUIRES: the trie
  // has not changed since, and the node has a block.
  size_t NumChildren(const std::vector<int>& blocks) const;
  int64_t num_blocks(int pool) const;
  // Returns every block in the trie, in no particular order.
  std::vector<PoolBlock> Blocks() const;
  // Throws InternalError that names the broken invariant.
  void CheckIntegrity() const;

 private:
  struct Node;
  Node* Child(Node* parent, std::span<const int32_t> key) const;
  bool MustLeave(const Node& node) const;

  // A node that Insert passed, with what Held returned before and after.
  struct Passed {
    uint64_t hash = 0;
    std::vector<bool> held = {};
    std::vector<bool> holds = {};
  };
  using Lost = std::vector<std::vector<uint64_t>>;  // hashes, indexed as Held
  // Returns whether the node has a block of each event group. Without event groups, the result is
  // whether the node exists.
  std::vector<bool> Held(const Node* node) const;
  void ReportStored(std::span<const int32_t> tokens, const CacheSalt& salt,
                    const std::vector<Passed>& path);
  void ReportLost(Lost lost);
  size_t num_reports() const { return std::max<size_t>(event_groups_.size(), 1); }
  std::optional<PrefixGroup> ReportedGroup(size_t report) const;

  // Takes the block of a pool, which the node must have.
  void TakeBlock(Node* node, int pool, std::vector<PoolBlock>* taken, Lost* lost);
  // Appends the blocks of a node and its descendants to `taken`, and erases the descendants.
  void TakeSubtree(Node* node, std::vector<PoolBlock>* taken, Lost* lost);
  void EraseEmpty(Node* node, Lost* lost);
  void NoteErased(const Node& node, Lost* lost) const;

  int num_pools_;
  std::vector<int> full_pools_;
  size_t block_seq_len_;
  PrefixEvents* events_;
  std::vector<EventGroup> event_groups_;
  std::unique_ptr<Node> root_;
  std::vector<std::unordered_map<int, Node*>> node_of_;  // by pool: block → node
};

}  // namespace turbomind
