#include "turbomind/kv/block_trie.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Compares token blocks so that a lookup need not build a vector.
struct TokenOrder {
  using is_transparent = void;
  bool operator()(std::span<const int32_t> a, std::span<const int32_t> b) const {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  }
};

constexpr size_t kSaltTokens = sizeof(CacheSalt) / sizeof(int32_t);

// Returns the key of the first block: the salt and its tokens.
std::vector<int32_t> FirstKey(std::span<const int32_t> tokens, const CacheSalt& salt) {
  std::vector<int32_t> key(kSaltTokens + tokens.size());
  std::memcpy(key.data(), salt.data(), sizeof(CacheSalt));
  std::copy(tokens.begin(), tokens.end(), key.begin() + kSaltTokens);
  return key;
}

}  // namespace

struct BlockTrie::Node {
  using Children = std::map<std::vector<int32_t>, std::unique_ptr<Node>, TokenOrder>;
  Node* parent = nullptr;
  Children children;
  Children::iterator place;  // in the parent's children; unset for the root
  std::vector<int> blocks;   // by pool
  uint64_t hash = 0;         // only with events

  bool HasBlock() const {
    return std::any_of(blocks.begin(), blocks.end(), [](int block) { return block >= 0; });
  }
  bool HasBlockIn(const std::vector<int>& pools) const {
    return std::any_of(pools.begin(), pools.end(),
                       [this](int pool) { return blocks[static_cast<size_t>(pool)] >= 0; });
  }
};

BlockTrie::BlockTrie(int num_pools, std::vector<int> full_pools, int block_seq_len,
                     PrefixEvents* events, std::vector<EventGroup> event_groups)
    : num_pools_(num_pools),
      full_pools_(std::move(full_pools)),
      block_seq_len_(static_cast<size_t>(block_seq_len)),
      events_(events),
      event_groups_(std::move(event_groups)),
      root_(std::make_unique<Node>()),
      node_of_(static_cast<size_t>(num_pools)) {
  Check(num_pools > 0 && block_seq_len > 0,
        "the number of pools and block_seq_len must be positive");
  for (const int pool : full_pools_) {
    Check(pool >= 0 && pool < num_pools, "every pool of the full-attention group must exist");
  }
}

BlockTrie::~BlockTrie() { Clear(); }

BlockTrie::Node* BlockTrie::Child(Node* parent, std::span<const int32_t> key) const {
  const auto place = parent->children.find(key);
  return place == parent->children.end() ? nullptr : place->second.get();
}

std::vector<std::vector<int>> BlockTrie::Find(std::span<const int32_t> tokens,
                                              const CacheSalt& salt) const {
  std::vector<std::vector<int>> path;
  Node* node = root_.get();
  for (size_t i = 0; i + block_seq_len_ <= tokens.size(); i += block_seq_len_) {
    const auto block = tokens.subspan(i, block_seq_len_);
    node = i == 0 ? Child(node, FirstKey(block, salt)) : Child(node, block);
    if (!node) {
      break;
    }
    path.push_back(node->blocks);
  }
  return path;
}

std::vector<PoolBlock> BlockTrie::Insert(std::span<const int32_t> tokens,
                                         const std::vector<std::vector<int32_t>>& tables,
                                         const CacheSalt& salt) {
  std::vector<PoolBlock> entered;
  std::vector<Passed> passed;  // only with events
  Node* node = root_.get();
  for (size_t i = 0; (i + 1) * block_seq_len_ <= tokens.size(); ++i) {
    const auto block_tokens = tokens.subspan(i * block_seq_len_, block_seq_len_);
    std::vector<int32_t> key = i == 0
                                   ? FirstKey(block_tokens, salt)
                                   : std::vector<int32_t>(block_tokens.begin(), block_tokens.end());
    Node* child = Child(node, key);
    if (events_) {
      passed.push_back({.held = Held(child)});
    }
    if (!child) {
      auto made = std::make_unique<Node>();
      child = made.get();
      child->parent = node;
      child->blocks.assign(static_cast<size_t>(num_pools_), -1);
      if (events_) {
        const auto parent =
            node == root_.get() ? std::nullopt : std::optional<uint64_t>(node->hash);
        child->hash = BlockHash(parent, key);
      }
      child->place = node->children.emplace(std::move(key), std::move(made)).first;
    }
    for (int pool = 0; pool < num_pools_; ++pool) {
      const auto p = static_cast<size_t>(pool);
      const int block = i < tables[p].size() ? tables[p][i] : -1;
      if (child->blocks[p] < 0 && block >= 0) {
        Check(node_of_[p].emplace(block, child).second,
              "a block must be in at most one node of the trie");
        child->blocks[p] = block;
        entered.push_back({pool, block});
      }
    }
    if (events_) {
      passed.back().hash = child->hash;
      passed.back().holds = Held(child);
    }
    node = child;
  }
  // Without a full-attention group, nodes outside every window may have received no block. Such a
  // node may stay only as an ancestor of other nodes.
  Lost lost(num_reports());
  EraseEmpty(node, &lost);
  if (events_) {
    ReportStored(tokens, salt, passed);
  }
  ReportLost(std::move(lost));
  return entered;
}

std::vector<bool> BlockTrie::Held(const Node* node) const {
  std::vector<bool> held(num_reports(), node != nullptr);
  for (size_t g = 0; node && g < event_groups_.size(); ++g) {
    held[g] = node->HasBlockIn(event_groups_[g].pools);
  }
  return held;
}

std::optional<PrefixGroup> BlockTrie::ReportedGroup(size_t report) const {
  return event_groups_.empty() ? std::nullopt : std::optional(event_groups_[report].group);
}

// The blocks of an event follow each other, so that a gap begins another event.
void BlockTrie::ReportStored(std::span<const int32_t> tokens, const CacheSalt& salt,
                             const std::vector<Passed>& path) {
  for (size_t report = 0; report < num_reports(); ++report) {
    PrefixEvent stored;
    for (size_t i = 0; i <= path.size(); ++i) {
      if (i < path.size() && path[i].holds[report] && !path[i].held[report]) {
        if (stored.blocks.empty()) {
          stored = {.kind = PrefixEventKind::kStored, .salt = salt, .group = ReportedGroup(report)};
          stored.parent = i == 0 ? std::nullopt : std::optional(path[i - 1].hash);
        }
        const auto block = tokens.subspan(i * block_seq_len_, block_seq_len_);
        stored.blocks.push_back(path[i].hash);
        stored.tokens.insert(stored.tokens.end(), block.begin(), block.end());
      } else if (!stored.blocks.empty()) {
        events_->Add(std::exchange(stored, {}));
      }
    }
  }
}

void BlockTrie::ReportLost(Lost lost) {
  for (size_t report = 0; events_ && report < lost.size(); ++report) {
    if (!lost[report].empty()) {
      events_->Add({.kind = PrefixEventKind::kRemoved,
                    .blocks = std::move(lost[report]),
                    .group = ReportedGroup(report)});
    }
  }
}

bool BlockTrie::MustLeave(const Node& node) const {
  return !full_pools_.empty() && !node.HasBlockIn(full_pools_);
}

void BlockTrie::NoteErased(const Node& node, Lost* lost) const {
  if (event_groups_.empty()) {
    lost->front().push_back(node.hash);
  }
}

void BlockTrie::EraseEmpty(Node* node, Lost* lost) {
  while (node != root_.get() && !node->HasBlock() && node->children.empty()) {
    NoteErased(*node, lost);
    Node* parent = node->parent;
    parent->children.erase(node->place);
    node = parent;
  }
}

void BlockTrie::TakeBlock(Node* node, int pool, std::vector<PoolBlock>* taken, Lost* lost) {
  const auto p = static_cast<size_t>(pool);
  taken->push_back({pool, node->blocks[p]});
  node_of_[p].erase(node->blocks[p]);
  node->blocks[p] = -1;
  for (size_t g = 0; g < event_groups_.size(); ++g) {
    const std::vector<int>& pools = event_groups_[g].pools;
    if (std::ranges::find(pools, pool) != pools.end() && !node->HasBlockIn(pools)) {
      (*lost)[g].push_back(node->hash);
    }
  }
}

// Iterative because a prefix may be many thousands of blocks deep.
void BlockTrie::TakeSubtree(Node* node, std::vector<PoolBlock>* taken, Lost* lost) {
  std::vector<Node*> pending = {node};
  std::vector<std::unique_ptr<Node>> doomed;
  while (!pending.empty()) {
    Node* current = pending.back();
    pending.pop_back();
    for (int pool = 0; pool < num_pools_; ++pool) {
      if (!current->blocks.empty() && current->blocks[static_cast<size_t>(pool)] >= 0) {
        TakeBlock(current, pool, taken, lost);
      }
    }
    for (auto& [key, child] : current->children) {
      NoteErased(*child, lost);
      pending.push_back(child.get());
      doomed.push_back(std::move(child));
    }
    current->children.clear();
  }
}

std::vector<PoolBlock> BlockTrie::Remove(PoolBlock block) {
  const auto& of_pool = node_of_[static_cast<size_t>(block.pool)];
  const auto found = of_pool.find(block.block);
  Check(found != of_pool.end(), "a removed block must be in the trie");
  Node* node = found->second;
  std::vector<PoolBlock> taken;
  Lost lost(num_reports());
  TakeBlock(node, block.pool, &taken, &lost);
  if (MustLeave(*node)) {
    TakeSubtree(node, &taken, &lost);
  }
  EraseEmpty(node, &lost);
  ReportLost(std::move(lost));
  return taken;
}

std::vector<PoolBlock> BlockTrie::Clear() {
  std::vector<PoolBlock> taken;
  Lost lost(num_reports());  // not reported: a kCleared event says it
  TakeSubtree(root_.get(), &taken, &lost);
  if (events_) {
    events_->Add({.kind = PrefixEventKind::kCleared});
  }
  return taken;
}

bool BlockTrie::Contains(PoolBlock block) const {
  return node_of_[static_cast<size_t>(block.pool)].contains(block.block);
}

int BlockTrie::Twin(PoolBlock block, int pool) const {
  const auto& of_pool = node_of_[static_cast<size_t>(block.pool)];
  const auto found = of_pool.find(block.block);
  Check(found != of_pool.end(), "the block must be in the trie");
  return found->second->blocks.at(static_cast<size_t>(pool));
}

size_t BlockTrie::NumChildren(const std::vector<int>& blocks) const {
  const auto pool = std::ranges::find_if(blocks, [](int block) { return block >= 0; });
  Check(pool != blocks.end(), "the node must have a block");
  return node_of_[static_cast<size_t>(pool - blocks.begin())].at(*pool)->children.size();
}

int64_t BlockTrie::num_blocks(int pool) const {
  return static_cast<int64_t>(node_of_[static_cast<size_t>(pool)].size());
}

std::vector<PoolBlock> BlockTrie::Blocks() const {
  std::vector<PoolBlock> blocks;
  for (int pool = 0; pool < num_pools_; ++pool) {
    for (const auto& [block, node] : node_of_[static_cast<size_t>(pool)]) {
      blocks.push_back({pool, block});
    }
  }
  return blocks;
}

void BlockTrie::CheckIntegrity() const {
  size_t listed = 0;
  for (const auto& of_pool : node_of_) {
    listed += of_pool.size();
  }
  size_t held = 0;
  std::vector<const Node*> pending = {root_.get()};
  while (!pending.empty()) {
    const Node* node = pending.back();
    pending.pop_back();
    if (node != root_.get()) {
      Check(node->HasBlock() || !node->children.empty(),
            "a node without blocks must have descendants");
      Check(!MustLeave(*node), "a node must have a block of the full-attention group");
      Check(node->place->second.get() == node, "a node must be a child of its parent");
      for (size_t p = 0; p < node->blocks.size(); ++p) {
        if (node->blocks[p] >= 0) {
          const auto found = node_of_[p].find(node->blocks[p]);
          Check(found != node_of_[p].end() && found->second == node,
                "each block must be listed under its node");
          ++held;
        }
      }
    }
    for (const auto& [key, child] : node->children) {
      const size_t salt_size = node == root_.get() ? kSaltTokens : 0;
      Check(key.size() == salt_size + block_seq_len_ && child->parent == node,
            "a child must hold a whole block and point to its parent");
      pending.push_back(child.get());
    }
  }
  Check(held == listed, "every listed block must be in a node");
}

}  // namespace turbomind
