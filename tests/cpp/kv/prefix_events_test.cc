#include "turbomind/kv/prefix_events.h"

#include <doctest/doctest.h>

#include <set>
#include <vector>

#include "turbomind/kv/block_trie.h"

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
