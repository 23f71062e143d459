#include "turbomind/kv/prefix_events.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "kv/test_pools.h"
#include "turbomind/kv/block_trie.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {
namespace {

// Three blocks of two tokens.
const std::vector<int32_t> kTokens = {1, 2, 3, 4, 5, 6};
constexpr CacheSalt kSalt = {7, 8};

TEST_CASE("a trie reports the nodes that it creates, erases and clears") {
  PrefixEvents events;
  BlockTrie trie(2, {0, 1}, 2, &events);
  trie.Insert(std::span(kTokens).first(2), {{10}, {-1}}, kSalt);
  trie.Insert(kTokens, {{10, 11, 12}, {20, -1, -1}}, kSalt);
  const std::vector<PrefixEvent> stored = events.Take(0);
  REQUIRE(stored.size() == 2);
  CHECK(stored[0].kind == PrefixEventKind::kStored);
  CHECK(stored[0].blocks.size() == 1);
  CHECK_FALSE(stored[0].parent.has_value());
  CHECK(stored[0].tokens == std::vector<int32_t>{1, 2});
  CHECK(stored[0].salt == kSalt);
  CHECK(stored[1].blocks.size() == 2);
  CHECK(stored[1].parent == stored[0].blocks[0]);
  CHECK(stored[1].tokens == std::vector<int32_t>{3, 4, 5, 6});

  trie.Remove({0, 10});  // the other pool still has the block
  CHECK(events.Take(0).empty());
  trie.Remove({0, 11});  // the third block cannot stay without it
  const std::vector<PrefixEvent> removed = events.Take(0);
  REQUIRE(removed.size() == 1);
  CHECK(removed[0].kind == PrefixEventKind::kRemoved);
  CHECK(std::set(removed[0].blocks.begin(), removed[0].blocks.end()) ==
        std::set(stored[1].blocks.begin(), stored[1].blocks.end()));

  trie.Clear();
  const std::vector<PrefixEvent> cleared = events.Take(0);
  REQUIRE(cleared.size() == 1);
  CHECK(cleared[0].kind == PrefixEventKind::kCleared);
}

TEST_CASE("a node that receives no block is reported as removed again") {
  PrefixEvents events;
  BlockTrie trie(1, {}, 2, &events);
  trie.Insert(kTokens, {{1, -1, -1}});
  const std::vector<PrefixEvent> both = events.Take(0);
  REQUIRE(both.size() == 2);
  CHECK(both[0].blocks.size() == 3);
  CHECK(both[1].kind == PrefixEventKind::kRemoved);
  CHECK(both[1].blocks == std::vector<uint64_t>{both[0].blocks[2], both[0].blocks[1]});
}

// Three groups: full attention with 16-bit copies, windows, and states.
const std::vector<EventGroup> kGroups = {{{.index = 0}, {0, 2}},
                                         {{.index = 1, .window = 2}, {1}},
                                         {{.index = 2, .is_state = true}, {3}}};

TEST_CASE("each group reports what it gains, in runs of consecutive blocks") {
  PrefixEvents events;
  BlockTrie trie(4, {0, 2}, 2, &events, kGroups);
  trie.Insert(kTokens, {{10, 11, 12}, {-1, -1, 22}, {30, -1, -1}, {40, -1, 42}}, kSalt);
  const std::vector<PrefixEvent> stored = events.Take(0);
  REQUIRE(stored.size() == 4);
  const std::vector<uint64_t> all = stored[0].blocks;
  REQUIRE(all.size() == 3);
  CHECK(stored[0].group == kGroups[0].group);
  CHECK(stored[0].tokens == kTokens);
  CHECK(stored[1].group == kGroups[1].group);
  CHECK(stored[1].blocks == std::vector{all[2]});
  CHECK(stored[1].parent == all[1]);
  CHECK(stored[1].tokens == std::vector<int32_t>{5, 6});
  CHECK(stored[1].salt == kSalt);
  CHECK(stored[2].group == kGroups[2].group);
  CHECK(stored[2].blocks == std::vector{all[0]});
  CHECK_FALSE(stored[2].parent.has_value());
  CHECK(stored[3].blocks == std::vector{all[2]});
  CHECK(stored[3].parent == all[1]);

  // What the nodes already have is not reported again: neither as is, nor in another pool.
  trie.Insert(kTokens, {{10, 11, 12}, {}, {30, 31, -1}, {40, -1, 42}}, kSalt);
  CHECK(events.Take(0).empty());
  trie.Insert(kTokens, {{}, {}, {}, {-1, 41, -1}}, kSalt);
  const std::vector<PrefixEvent> more = events.Take(0);
  REQUIRE(more.size() == 1);
  CHECK(more[0].group == kGroups[2].group);
  CHECK(more[0].blocks == std::vector{all[1]});
}

TEST_CASE("a block that leaves one group is reported for that group only") {
  PrefixEvents events;
  BlockTrie trie(4, {0, 2}, 2, &events, kGroups);
  trie.Insert(kTokens, {{10, 11, 12}, {-1, 21, 22}, {30, -1, -1}, {40, -1, 42}});
  const std::vector<uint64_t> all = events.Take(0).at(0).blocks;
  trie.Remove({0, 10});  // the group still has the 16-bit copy
  CHECK(events.Take(0).empty());
  trie.Remove({3, 40});
  const std::vector<PrefixEvent> one = events.Take(0);
  REQUIRE(one.size() == 1);
  CHECK(one[0].kind == PrefixEventKind::kRemoved);
  CHECK(one[0].group == kGroups[2].group);
  CHECK(one[0].blocks == std::vector{all[0]});

  trie.Remove({0, 11});  // the third block cannot stay without it
  const std::vector<PrefixEvent> removed = events.Take(0);
  REQUIRE(removed.size() == 3);
  CHECK(removed[0].group == kGroups[0].group);
  CHECK(removed[0].blocks == std::vector{all[1], all[2]});
  CHECK(removed[1].group == kGroups[1].group);
  CHECK(removed[1].blocks == std::vector{all[1], all[2]});
  CHECK(removed[2].group == kGroups[2].group);
  CHECK(removed[2].blocks == std::vector{all[2]});

  trie.Clear();
  const std::vector<PrefixEvent> cleared = events.Take(0);
  REQUIRE(cleared.size() == 1);
  CHECK(cleared[0].kind == PrefixEventKind::kCleared);
  CHECK_FALSE(cleared[0].group.has_value());
}

// A router that follows the events must know exactly the blocks that the trie has.
TEST_CASE("the events of random operations add up to the contents of the trie") {
  std::mt19937 random(3);
  for (const bool has_full : {true, false}) {
    PrefixEvents events;
    BlockTrie trie(4, has_full ? std::vector{0, 2} : std::vector<int>(), 2, &events, kGroups);
    std::set<std::pair<int, uint64_t>> known;  // by group
    int next_block = 0;
    for (int step = 0; step < 2000; ++step) {
      const std::vector<PoolBlock> blocks = trie.Blocks();
      if (random() % 2 == 0 || blocks.empty()) {
        std::vector<int32_t> tokens;
        std::vector<std::vector<int32_t>> tables(4);
        for (int i = 0; i < 4; ++i) {
          const auto token = static_cast<int32_t>(random() % 2);
          tokens.insert(tokens.end(), {token, token});
          for (size_t pool = 0; pool < 4; ++pool) {
            const bool is_there = (has_full && pool == 0) || random() % 2 == 0;
            tables[pool].push_back(is_there ? next_block++ : -1);
          }
        }
        trie.Insert(tokens, tables);
      } else {
        trie.Remove(blocks[random() % blocks.size()]);
      }
      for (const PrefixEvent& event : events.Take(0)) {
        for (const uint64_t block : event.blocks) {
          const std::pair entry = {event.group.value().index, block};
          CHECK((event.kind == PrefixEventKind::kStored ? known.insert(entry).second
                                                        : known.erase(entry) == 1));
        }
      }
      size_t held = 0;
      for (const EventGroup& group : kGroups) {
        for (const PoolBlock& block : trie.Blocks()) {
          const bool counts = std::ranges::find(group.pools, block.pool) != group.pools.end();
          // A node that has two blocks of the group counts once.
          const bool is_second = block.pool == 2 && trie.Twin(block, 0) >= 0;
          held += counts && !is_second ? 1 : 0;
        }
      }
      REQUIRE(known.size() == held);
    }
  }
}

// Returns the groups of the events of a prompt of three blocks, in order.
std::vector<std::optional<PrefixGroup>> GroupsOf(const KvCacheConfig& config,
                                                 const std::vector<int64_t>& num_blocks) {
  PrefixEvents events;
  MemoryDevice device;
  KvCache cache(device, config, num_blocks);
  SequenceManager manager(cache, true, &events);
  const std::vector<int32_t> prompt = testing::Tokens(3 * testing::kLength);
  manager.Create(1, prompt);
  REQUIRE(manager.AllocateDataAndScaleBlocks(1, 3 * testing::kLength));
  manager.Commit(1, prompt);
  std::vector<std::optional<PrefixGroup>> groups;
  for (const PrefixEvent& event : events.Take(0)) {
    CHECK(event.kind == PrefixEventKind::kStored);
    if (std::ranges::find(groups, event.group) == groups.end()) {
      groups.push_back(event.group);
    }
  }
  return groups;
}

TEST_CASE("windows and states are groups, and one group has no name") {
  using Groups = std::vector<std::optional<PrefixGroup>>;
  const Groups unnamed = {std::nullopt};
  CHECK(GroupsOf(testing::PoolConfig({0, 0}), {8}) == unnamed);
  CHECK(GroupsOf(testing::PoolConfig({24}), {8}) == unnamed);
  KvCacheConfig mixed = testing::PoolConfig({0, 0}, testing::kLength, {0, 64});
  mixed.layers[0] = {KvCacheMode::kNone, KvCacheMode::kNone};
  CHECK(GroupsOf(mixed, {8, 8, 8, 0}) == unnamed);
  const PrefixGroup full = {.index = 0};
  CHECK(
      GroupsOf(testing::PoolConfig({0, 24, -32, 0}), {8, 8, 8}) ==
      Groups{full, PrefixGroup{.index = 1, .window = 24}, PrefixGroup{.index = 2, .window = -32}});
  KvCacheConfig hybrid = testing::PoolConfig({kNoAttention, 0});
  hybrid.state_bytes = hybrid.checkpoint_bytes = 64;
  CHECK(GroupsOf(hybrid, {8, 4, 4}) == Groups{full, PrefixGroup{.index = 1, .is_state = true}});
  hybrid.windows[1] = 24;
  CHECK(GroupsOf(hybrid, {8, 4, 4}) ==
        Groups{PrefixGroup{.index = 0, .window = 24}, PrefixGroup{.index = 1, .is_state = true}});
}

TEST_CASE("a checkpoint that is evicted alone is an event of its group") {
  KvCacheConfig config = testing::PoolConfig({kNoAttention, 0});
  config.state_bytes = config.checkpoint_bytes = 64;
  PrefixEvents events;
  MemoryDevice device;
  KvCache cache(device, config, {64, 4, 2});
  SequenceManager manager(cache, true, &events);
  std::set<uint64_t> checkpoints;
  for (uint64_t id = 0; id < 4; ++id) {
    const auto prompt = testing::Tokens(3 * testing::kLength, static_cast<int>(1000 * id));
    manager.Create(id, prompt);
    REQUIRE(manager.AllocateDataAndScaleBlocks(id, 3 * testing::kLength));
    manager.Commit(id, prompt);
    manager.FreeDataAndScaleBlocks(id);
    bool has_removed = false;
    for (const PrefixEvent& event : events.Take(0)) {
      REQUIRE(event.group.has_value());
      if (event.kind == PrefixEventKind::kRemoved) {
        CHECK(event.group->is_state);
        has_removed = true;
      }
      for (const uint64_t block : event.blocks) {
        if (event.kind == PrefixEventKind::kRemoved) {
          CHECK(checkpoints.erase(block) == 1);
        } else if (event.group->is_state) {
          CHECK(checkpoints.insert(block).second);
        }
      }
    }
    CHECK(has_removed == (id > 0));
    CHECK(checkpoints.size() == 2);
  }
  CHECK(manager.counts(0).cached == 12);
}

TEST_CASE("equal blocks have equal hashes in all tries, and salts separate them") {
  std::vector<std::vector<uint64_t>> hashes;
  for (const CacheSalt& salt : {CacheSalt{}, CacheSalt{}, kSalt}) {
    PrefixEvents events;
    BlockTrie trie(1, {0}, 2, &events);
    trie.Insert(kTokens, {{0, 1, 2}}, salt);
    hashes.push_back(events.Take(0).at(0).blocks);
  }
  CHECK(hashes[0] == hashes[1]);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(hashes[0][i] != hashes[2][i]);
  }
  CHECK(BlockHash(1, {3, 4}) != BlockHash(2, {3, 4}));
  CHECK(BlockHash(1, {3, 4}) != BlockHash(1, {4, 3}));
}

TEST_CASE("a full queue holds one kCleared event and what follows it") {
  PrefixEvents events;
  for (size_t i = 0; i < PrefixEvents::kMaxBlocks; ++i) {
    events.Add({.kind = PrefixEventKind::kStored, .blocks = {i}, .tokens = {1}});
  }
  events.Add({.kind = PrefixEventKind::kRemoved, .blocks = {0}});
  events.Add({.kind = PrefixEventKind::kStored, .blocks = {1}, .tokens = {1}});
  const std::vector<PrefixEvent> left = events.Take(0);
  REQUIRE(left.size() == 2);
  CHECK(left[0].kind == PrefixEventKind::kCleared);
  CHECK(left[0].blocks.empty());
  CHECK(left[1].kind == PrefixEventKind::kStored);
}

}  // namespace
}  // namespace turbomind
