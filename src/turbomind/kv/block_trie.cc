#include "turbomind/kv/block_trie.h"

#include <algorithm>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Compares token blocks without building a vector for a look-up.
struct TokenOrder {
  using is_transparent = void;
  bool operator()(std::span<const int32_t> a, std::span<const int32_t> b) const {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  }
};

}  // namespace

struct BlockTrie::Node {
  using Children = std::map<std::vector<int32_t>, std::unique_ptr<Node>, TokenOrder>;
  Node* parent = nullptr;
  Children children;
  Children::iterator place;  // in the parent's children; not of the root
  std::vector<int> blocks;   // by group

  bool HasBlock() const {
    return std::any_of(blocks.begin(), blocks.end(), [](int block) { return block >= 0; });
  }
};

BlockTrie::BlockTrie(int num_groups, int full_group, int block_seq_len)
    : num_groups_(num_groups),
      full_group_(full_group),
      block_seq_len_(static_cast<size_t>(block_seq_len)),
      root_(std::make_unique<Node>()),
      node_of_(static_cast<size_t>(num_groups)) {
  Check(num_groups > 0 && full_group < num_groups && block_seq_len > 0, "a trie has groups");
}

BlockTrie::~BlockTrie() { Clear(); }

BlockTrie::Node* BlockTrie::Child(Node* parent, std::span<const int32_t> key) const {
  const auto place = parent->children.find(key);
  return place == parent->children.end() ? nullptr : place->second.get();
}

std::vector<std::vector<int>> BlockTrie::Find(std::span<const int32_t> tokens) const {
  std::vector<std::vector<int>> path;
  Node* node = root_.get();
  for (size_t i = 0; i + block_seq_len_ <= tokens.size(); i += block_seq_len_) {
    node = Child(node, tokens.subspan(i, block_seq_len_));
    if (!node) {
      break;
    }
    path.push_back(node->blocks);
  }
  return path;
}

std::vector<GroupBlock> BlockTrie::Insert(std::span<const int32_t> tokens,
                                          const std::vector<std::vector<int32_t>>& tables) {
  std::vector<GroupBlock> entered;
  Node* node = root_.get();
  for (size_t i = 0; (i + 1) * block_seq_len_ <= tokens.size(); ++i) {
    const auto key = tokens.subspan(i * block_seq_len_, block_seq_len_);
    Node* child = Child(node, key);
    if (!child) {
      auto made = std::make_unique<Node>();
      child = made.get();
      child->parent = node;
      child->blocks.assign(static_cast<size_t>(num_groups_), -1);
      child->place =
          node->children.emplace(std::vector<int32_t>(key.begin(), key.end()), std::move(made))
              .first;
    }
    for (int group = 0; group < num_groups_; ++group) {
      const auto g = static_cast<size_t>(group);
      const int block = tables[g][i];
      if (child->blocks[g] < 0 && block >= 0) {
        Check(node_of_[g].emplace(block, child).second, "a block enters the trie once");
        child->blocks[g] = block;
        entered.push_back({group, block});
      }
    }
    node = child;
  }
  // Without a full group, nodes behind every window may have stayed empty: fine above others only.
  while (node != root_.get() && !node->HasBlock() && node->children.empty()) {
    Node* parent = node->parent;
    Erase(node);
    node = parent;
  }
  return entered;
}

void BlockTrie::Erase(Node* node) { node->parent->children.erase(node->place); }

// Iterative: a prefix may be many thousand blocks deep.
void BlockTrie::TakeSubtree(Node* node, std::vector<GroupBlock>* taken) {
  std::vector<Node*> pending = {node};
  std::vector<std::unique_ptr<Node>> doomed;
  while (!pending.empty()) {
    Node* current = pending.back();
    pending.pop_back();
    for (int group = 0; group < num_groups_; ++group) {
      const auto g = static_cast<size_t>(group);
      if (!current->blocks.empty() && current->blocks[g] >= 0) {
        taken->push_back({group, current->blocks[g]});
        node_of_[g].erase(current->blocks[g]);
        current->blocks[g] = -1;
      }
    }
    for (auto& [key, child] : current->children) {
      pending.push_back(child.get());
      doomed.push_back(std::move(child));
    }
    current->children.clear();
  }
}

std::vector<GroupBlock> BlockTrie::Remove(GroupBlock block) {
  const auto g = static_cast<size_t>(block.group);
  const auto found = node_of_[g].find(block.block);
  Check(found != node_of_[g].end(), "a removed block is in the trie");
  Node* node = found->second;
  std::vector<GroupBlock> taken;
  if (block.group == full_group_) {
    TakeSubtree(node, &taken);
  } else {
    taken.push_back(block);
    node->blocks[g] = -1;
    node_of_[g].erase(found);
  }
  while (node != root_.get() && !node->HasBlock() && node->children.empty()) {
    Node* parent = node->parent;
    Erase(node);
    node = parent;
  }
  return taken;
}

std::vector<GroupBlock> BlockTrie::Clear() {
  std::vector<GroupBlock> taken;
  TakeSubtree(root_.get(), &taken);
  return taken;
}

bool BlockTrie::Contains(GroupBlock block) const {
  return node_of_[static_cast<size_t>(block.group)].contains(block.block);
}

int64_t BlockTrie::num_blocks(int group) const {
  return static_cast<int64_t>(node_of_[static_cast<size_t>(group)].size());
}

std::vector<GroupBlock> BlockTrie::Blocks() const {
  std::vector<GroupBlock> blocks;
  for (int group = 0; group < num_groups_; ++group) {
    for (const auto& [block, node] : node_of_[static_cast<size_t>(group)]) {
      blocks.push_back({group, block});
    }
  }
  return blocks;
}

void BlockTrie::CheckIntegrity() const {
  size_t listed = 0;
  for (const auto& of_group : node_of_) {
    listed += of_group.size();
  }
  size_t held = 0;
  std::vector<const Node*> pending = {root_.get()};
  while (!pending.empty()) {
    const Node* node = pending.back();
    pending.pop_back();
    if (node != root_.get()) {
      Check(node->HasBlock() || !node->children.empty(), "an empty node has descendants");
      Check(full_group_ < 0 || node->blocks[static_cast<size_t>(full_group_)] >= 0,
            "a node has a block of the full-attention group");
      Check(node->place->second.get() == node, "a node is its parent's child");
      for (size_t g = 0; g < node->blocks.size(); ++g) {
        if (node->blocks[g] >= 0) {
          const auto found = node_of_[g].find(node->blocks[g]);
          Check(found != node_of_[g].end() && found->second == node, "a block is in one node");
          ++held;
        }
      }
    }
    for (const auto& [key, child] : node->children) {
      Check(key.size() == block_seq_len_ && child->parent == node, "a child is a whole block");
      pending.push_back(child.get());
    }
  }
  Check(held == listed, "every listed block is in a node");
}

}  // namespace turbomind
