#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

namespace turbomind {

// A block of a layer group.
struct GroupBlock {
  int group = 0;
  int block = -1;
  bool operator==(const GroupBlock&) const = default;
};

// The prefix cache: which blocks hold the K and V of a given sequence of tokens.
//
// A node stands for block_seq_len tokens after those of its parent and carries one block id per
// layer group, -1 where that group has none (evicted, or behind a window when it was committed).
// Tokens are compared exactly; there is no hash.
//
// Invariants:
//  1. A block is in at most one node.
//  2. Where there is a full-attention group, each node has its block: when it leaves, the node's
//     whole subtree leaves, since no hit could use it.
//  3. Otherwise a node without blocks has descendants.
// Knows nothing of reference counts: SequenceManager marks what is in the trie in its
// BlockManagers. Not thread-safe: the engine thread's.
class BlockTrie {
 public:
  // `full_group` is the index of the full-attention group or -1.
  BlockTrie(int num_groups, int full_group, int block_seq_len);
  ~BlockTrie();
  BlockTrie(const BlockTrie&) = delete;
  BlockTrie& operator=(const BlockTrie&) = delete;

  // Block ids of the nodes along `tokens`, as far as the trie goes: result[i][group]. Only whole
  // blocks count.
  std::vector<std::vector<int>> Find(std::span<const int32_t> tokens) const;

  // Enters tables[group][i] for the i-th whole block of `tokens`, creating nodes as needed; places
  // that are taken, and ids of -1, are left alone. Returns what was entered.
  std::vector<GroupBlock> Insert(std::span<const int32_t> tokens,
                                 const std::vector<std::vector<int32_t>>& tables);

  // Takes a block out, with whatever must go with it. Returns all that left, the block included.
  // REQUIRES: Contains(block).
  std::vector<GroupBlock> Remove(GroupBlock block);
  // Takes everything out.
  std::vector<GroupBlock> Clear();

  bool Contains(GroupBlock block) const;
  int64_t num_blocks(int group) const;
  // Every block in the trie, in no particular order.
  std::vector<GroupBlock> Blocks() const;
  // Throws InternalError naming a broken invariant.
  void CheckIntegrity() const;

 private:
  struct Node;
  Node* Child(Node* parent, std::span<const int32_t> key) const;
  void TakeSubtree(Node* node, std::vector<GroupBlock>* taken);
  void Erase(Node* node);

  int num_groups_;
  int full_group_;
  size_t block_seq_len_;
  std::unique_ptr<Node> root_;
  std::vector<std::unordered_map<int, Node*>> node_of_;  // by group: block → node
};

}  // namespace turbomind
