#include "turbomind/kv/block_trie.h"

#include <doctest/doctest.h>

#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Three blocks of two tokens.
const std::vector<int32_t> kTokens = {1, 2, 3, 4, 5, 6};

TEST_CASE("a node exists while a pool of the full-attention group holds its block") {
  // Pools 0 and 1 are the quantized pools of full attention and of a sliding window. Pools 2 and
  // 3 are their 16-bit pools.
  BlockTrie trie(4, {0, 2}, 2);
  trie.Insert(kTokens, {{-1, 11, 12}, {20, 21, 22}, {30, 31, -1}, {40, 41, 42}});
  trie.CheckIntegrity();
  CHECK(trie.Twin({2, 31}, 0) == 11);
  CHECK(trie.Twin({2, 30}, 0) == -1);
  CHECK(trie.Remove({2, 31}) == std::vector<PoolBlock>{{2, 31}});  // 11 remains
  CHECK(trie.Remove({3, 41}) == std::vector<PoolBlock>{{3, 41}});
  CHECK(trie.Find(kTokens).size() == 3);
  trie.CheckIntegrity();
  // 11 is the last full-attention block of the second node. Removing it also removes the node's
  // sliding-window blocks and the third node.
  const std::vector<PoolBlock> taken = trie.Remove({0, 11});
  CHECK(taken == std::vector<PoolBlock>{{0, 11}, {1, 21}, {0, 12}, {1, 22}, {3, 42}});
  CHECK(trie.Find(kTokens).size() == 1);
  trie.CheckIntegrity();
  CHECK_THROWS_AS(trie.Remove({0, 11}), InternalError);
  CHECK_THROWS_AS(trie.Twin({0, 11}, 2), InternalError);
  CHECK(trie.Remove({2, 30}).size() == 3);
  CHECK(trie.Blocks().empty());
}

TEST_CASE("Insert fills empty places and keeps existing blocks") {
  BlockTrie trie(2, {0, 1}, 2);
  trie.Insert(kTokens, {{-1, -1, -1}, {1, 2, 3}});
  const std::vector<PoolBlock> entered = trie.Insert(kTokens, {{4, 5, -1}, {6, -1, 7}});
  CHECK(entered == std::vector<PoolBlock>{{0, 4}, {0, 5}});
  CHECK(trie.Find(kTokens) == std::vector<std::vector<int>>{{4, 1}, {5, 2}, {-1, 3}});
  CHECK(trie.num_blocks(0) == 2);
  CHECK(trie.num_blocks(1) == 3);
  trie.CheckIntegrity();
}

TEST_CASE("equal tokens with other salts share no node") {
  BlockTrie trie(1, {0}, 2);
  const CacheSalt salts[] = {{}, {1, 0}, {0, 1}, {~0ULL, ~0ULL}};
  int block = 0;
  for (const CacheSalt& salt : salts) {
    CHECK(trie.Find(kTokens, salt).empty());
    CHECK(trie.Insert(kTokens, {{block, block + 1, block + 2}}, salt).size() == 3);
    CHECK(trie.Insert(kTokens, {{90, 91, 92}}, salt).empty());
    block += 3;
    trie.CheckIntegrity();
  }
  block = 0;
  for (const CacheSalt& salt : salts) {
    CHECK(trie.Find(kTokens, salt) ==
          std::vector<std::vector<int>>{{block}, {block + 1}, {block + 2}});
    block += 3;
  }
  CHECK(trie.Remove({0, 3}).size() == 3);  // the first block of the second salt
  CHECK(trie.Find(kTokens, salts[1]).empty());
  CHECK(trie.num_blocks(0) == 9);
  trie.CheckIntegrity();
}

TEST_CASE("without a full-attention group, removing a block removes no other block") {
  BlockTrie trie(2, {}, 2);
  trie.Insert(kTokens, {{1, 2, 3}, {4, 5, 6}});
  CHECK(trie.Remove({0, 1}).size() == 1);
  CHECK(trie.Remove({1, 4}).size() == 1);
  trie.CheckIntegrity();
  CHECK(trie.Find(kTokens).size() == 3);
  for (const PoolBlock& block : trie.Blocks()) {
    trie.Remove(block);
    trie.CheckIntegrity();
  }
  CHECK(trie.Find(kTokens).empty());
}

}  // namespace
}  // namespace turbomind
