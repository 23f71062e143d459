#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

namespace turbomind {

// A block of a pool (kv_cache.h).
struct PoolBlock {
  int pool = 0;
  int block = -1;
  bool operator==(const PoolBlock&) const = default;
};

// The prefix cache: which blocks hold the K and V of a given sequence of tokens.
//
// A node stands for block_seq_len tokens after those of its parent and carries one block id per
// pool, -1 where that pool has none (evicted, not quantized yet, or behind a window when it was
// committed). Tokens are compared exactly; there is no hash.
//
// Invariants:
//  1. A block is in at most one node.
//  2. Where there is a full-attention group, each node has a block in one of its pools: when the
//     last one leaves, the node's whole subtree leaves, since no hit could use it.
//  3. Otherwise a node without blocks has descendants.
// Knows nothing of reference counts: SequenceManager marks what is in the trie in its
// BlockManagers. Not thread-safe: the engine thread's.
class BlockTrie {
 public:
  // `full_pools` are those of the full-attention group; empty where there is none.
  BlockTrie(int num_pools, std::vector<int> full_pools, int block_seq_len);
  ~BlockTrie();
  BlockTrie(const BlockTrie&) = delete;
  BlockTrie& operator=(const BlockTrie&) = delete;

  // Block ids of the nodes along `tokens`, as far as the trie goes: result[i][pool]. Only whole
  // blocks count.
  std::vector<std::vector<int>> Find(std::span<const int32_t> tokens) const;

  // Enters tables[pool][i] for the i-th whole block of `tokens`, creating nodes as needed; places
  // that are taken, and ids of -1, are left alone. Returns what was entered.
  std::vector<PoolBlock> Insert(std::span<const int32_t> tokens,
                                const std::vector<std::vector<int32_t>>& tables);

  // Takes a block out, with whatever must go with it. Returns all that left, the block included.
  // REQUIRES: Contains(block).
  std::vector<PoolBlock> Remove(PoolBlock block);
  // Takes everything out.
  std::vector<PoolBlock> Clear();

  bool Contains(PoolBlock block) const;
  // The block of another pool for the same tokens; -1: none. REQUIRES: Contains(block).
  int Twin(PoolBlock block, int pool) const;
  int64_t num_blocks(int pool) const;
  // Every block in the trie, in no particular order.
  std::vector<PoolBlock> Blocks() const;
  // Throws InternalError naming a broken invariant.
  void CheckIntegrity() const;

 private:
  struct Node;
  Node* Child(Node* parent, std::span<const int32_t> key) const;
  bool MustLeave(const Node& node) const;
  void TakeSubtree(Node* node, std::vector<PoolBlock>* taken);
  void Erase(Node* node);

  int num_pools_;
  std::vector<int> full_pools_;
  size_t block_seq_len_;
  std::unique_ptr<Node> root_;
  std::vector<std::unordered_map<int, Node*>> node_of_;  // by pool: block → node
};

}  // namespace turbomind
