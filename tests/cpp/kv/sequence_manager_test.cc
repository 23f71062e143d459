#include "turbomind/kv/sequence_manager.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kv/fits.h"
#include "kv/test_pools.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::kLength;
using testing::Pools;
using testing::Tokens;

TEST_CASE("a hit has all committed whole blocks, but never the whole prompt") {
  Pools pools({0, 40}, {64, 64});
  pools.RunAndFree(1, Tokens(100));
  CHECK(pools.manager.counts(0).cached == 6);
  CHECK(pools.manager.counts(1).cached == 6);
  const struct {
    int length;
    int hit;
  } cases[] = {{1, 0}, {16, 0}, {17, 16}, {96, 80}, {97, 96}, {100, 96}, {300, 96}};
  uint64_t id = 10;
  for (const auto& [length, hit] : cases) {
    CHECK(pools.manager.Create(++id, Tokens(length)) == hit);
    CHECK(pools.manager.num_written(id) == hit);
    pools.manager.CheckIntegrity();
    pools.manager.FreeDataAndScaleBlocks(id);
  }
  CHECK(pools.manager.Create(100, Tokens(100, 1)) == 0);      // other tokens
  CHECK(pools.manager.Create(101, Tokens(100), false) == 0);  // without the prefix cache
  std::vector<int32_t> late = Tokens(100);
  late[50] = -1;
  CHECK(pools.manager.Create(102, late) == 48);
}

TEST_CASE("sequences with different salts share no block") {
  Pools pools({0, 40}, {64, 64});
  const CacheSalt ours = {1, 2};
  const CacheSalt theirs = {1, 3};
  CHECK(pools.manager.Create(1, Tokens(100), true, ours) == 0);
  REQUIRE(pools.Compute(1, Tokens(100)));
  CHECK(pools.manager.Create(2, Tokens(100)) == 0);
  CHECK(pools.manager.Create(3, Tokens(100), true, theirs) == 0);
  REQUIRE(pools.Compute(3, Tokens(100)));
  CHECK(pools.manager.Create(4, Tokens(100), true, ours) == 96);
  CHECK(pools.manager.Create(5, Tokens(100), true, theirs) == 96);
  for (int pool = 0; pool < 2; ++pool) {
    for (const int32_t block : pools.manager.BlockTable(4, pool)) {
      const auto others = pools.manager.BlockTable(5, pool);
      CHECK((block < 0 || std::ranges::find(others, block) == others.end()));
    }
  }
  pools.manager.CheckIntegrity();
}

TEST_CASE("a hit shares all full-attention blocks and the visible sliding-window blocks") {
  Pools pools({0, 40}, {64, 64});
  pools.RunAndFree(1, Tokens(161));
  CHECK(pools.manager.Create(2, Tokens(161)) == 160);
  CHECK(pools.manager.Create(3, Tokens(161)) == 160);
  const auto full = pools.manager.BlockTable(2, 0);
  const auto window = pools.manager.BlockTable(2, 1);
  REQUIRE(full.size() == 10);
  REQUIRE(window.size() == 10);
  for (size_t i = 0; i < 10; ++i) {
    CHECK(full[i] >= 0);
    CHECK(full[i] == pools.manager.BlockTable(3, 0)[i]);
    CHECK((window[i] >= 0) == (i >= 7));  // ⌈40 / 16⌉ = 3
  }
  CHECK(pools.manager.counts(0).active == 10);
  CHECK(pools.manager.counts(1).active == 3);
}

TEST_CASE("blocks that leave a sliding window are freed while the sequence grows") {
  Pools pools({0, 40}, {64, 64}, false);
  pools.manager.Create(1, Tokens(400));
  REQUIRE(pools.Compute(1, Tokens(400), 10));
  CHECK(pools.manager.counts(0).active == 25);
  CHECK(pools.manager.counts(1).active == 3);
  CHECK(pools.manager.counts(1).cached == 0);
  CHECK(pools.manager.BlockTable(1, 1)[21] == -1);
  CHECK(pools.manager.BlockTable(1, 1)[22] >= 0);
  CHECK(pools.manager.high_water(1) <= pools.cache.groups()[1].BlocksPerSequence(400, 10));
}

TEST_CASE("an evicted sliding-window block limits hits to positions whose window is cached") {
  Pools pools({0, 32}, {64, 8});
  pools.RunAndFree(1, Tokens(113), 16);  // 7 blocks, all cached in both groups
  CHECK(pools.manager.counts(1).cached == 7);
  // This takes the free block of the sliding-window group and evicts its oldest cached blocks.
  pools.manager.Create(2, Tokens(64, 5000));
  REQUIRE(pools.Compute(2, Tokens(64, 5000)));
  CHECK(pools.manager.counts(1).cached > 0);
  const int64_t hit = pools.manager.Create(3, Tokens(113));
  pools.manager.CheckIntegrity();
  CHECK(hit == 112);  // the oldest were evicted; the end keeps its window
  pools.manager.FreeDataAndScaleBlocks(3);
  CHECK(pools.manager.Create(4, Tokens(33)) == 0);  // the beginning has lost its window
  CHECK(pools.manager.counts(0).cached == 7);
}

TEST_CASE("allocation is all or nothing and evicts only unused blocks") {
  Pools pools({0, 40}, {10, 10});
  pools.RunAndFree(1, Tokens(64));
  pools.manager.Create(2, Tokens(96, 1000));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(2, 96));
  CHECK(pools.manager.counts(0).cached == 4);
  pools.manager.Create(3, Tokens(200, 2000));
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(3, 65));  // 5 blocks of 4
  CHECK(pools.manager.counts(0).cached == 4);
  CHECK(pools.manager.BlockTable(3, 0).empty());
  CHECK(pools.manager.AllocateDataAndScaleBlocks(3, 64));
  CHECK(pools.manager.counts(0).cached == 0);
  CHECK(pools.manager.counts(0).active == 10);
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(3, 65));
  CHECK(pools.manager.AllocateDataAndScaleBlocks(3, 10));  // fewer than allocated: no change
  pools.manager.CheckIntegrity();
  CHECK(testing::Fits(pools.cache, 160, 16));
  CHECK_FALSE(testing::Fits(pools.cache, 161, 16));
}

TEST_CASE("a preempted sequence finds its committed blocks again") {
  Pools pools({0}, {16});
  pools.manager.Create(1, Tokens(70));
  REQUIRE(pools.Compute(1, Tokens(70)));
  pools.manager.FreeDataAndScaleBlocks(1);
  CHECK(pools.manager.Create(1, Tokens(70)) == 64);
}

TEST_CASE("a hit never includes slots that were not written") {
  Pools pools({0}, {16});
  pools.manager.Create(1, Tokens(70));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 70));
  CHECK(pools.manager.Create(2, Tokens(70)) == 0);
  pools.manager.Commit(1, Tokens(40));
  CHECK(pools.manager.Create(3, Tokens(70)) == 32);
  pools.manager.FreeDataAndScaleBlocks(1);
  pools.manager.CheckIntegrity();
  CHECK(pools.manager.counts(0).free == 14);
}

TEST_CASE("two sequences that compute the same prompt at once keep separate blocks") {
  Pools pools({0}, {32});
  const std::vector<int32_t> tokens = Tokens(80);
  pools.manager.Create(1, tokens);
  pools.manager.Create(2, tokens);
  REQUIRE(pools.Compute(1, tokens));
  REQUIRE(pools.Compute(2, tokens));
  CHECK(pools.manager.counts(0).active == 10);
  pools.manager.FreeDataAndScaleBlocks(1);
  pools.manager.FreeDataAndScaleBlocks(2);
  CHECK(pools.manager.counts(0).cached == 5);
  CHECK(pools.manager.counts(0).free == 27);
  pools.manager.CheckIntegrity();
}

TEST_CASE("a sequence enters its own blocks after the root of its prefix was evicted") {
  Pools pools({0}, {12});
  const std::vector<int32_t> tokens = Tokens(64);
  pools.manager.Create(1, tokens);
  pools.manager.Create(2, Tokens(96));
  REQUIRE(pools.Compute(1, tokens));
  REQUIRE(pools.Compute(2, Tokens(80)));  // 4 duplicates; the 5th continues those of sequence 1
  pools.manager.FreeDataAndScaleBlocks(1);
  pools.manager.Create(3, Tokens(112, 9000));
  REQUIRE(pools.Compute(3, Tokens(112, 9000)));  // takes all remaining blocks
  CHECK(pools.manager.counts(0).cached == 0);
  pools.manager.FreeDataAndScaleBlocks(3);
  REQUIRE(pools.Compute(2, Tokens(96)));  // its own blocks enter the trie from the root
  pools.manager.FreeDataAndScaleBlocks(2);
  CHECK(pools.manager.Create(4, Tokens(97)) == 96);
  pools.manager.CheckIntegrity();
}

TEST_CASE("ClearPrefixCache drops cached blocks and keeps active ones") {
  Pools pools({0, 40}, {32, 32});
  pools.RunAndFree(1, Tokens(100));
  pools.manager.Create(2, Tokens(100));
  REQUIRE(pools.Compute(2, Tokens(100)));
  pools.RunAndFree(3, Tokens(100, 700));
  pools.manager.ClearPrefixCache();
  pools.manager.CheckIntegrity();
  CHECK(pools.manager.counts(0).cached == 0);
  CHECK(pools.manager.counts(0).active == 7);
  CHECK(pools.manager.Create(4, Tokens(100)) == 0);
  pools.manager.FreeDataAndScaleBlocks(2);
  pools.manager.FreeDataAndScaleBlocks(4);
  CHECK(pools.manager.counts(0).free == 32);
}

TEST_CASE("unused blocks are allocated last") {
  Pools pools({0}, {100}, false);
  for (uint64_t id = 1; id < 20; ++id) {
    pools.RunAndFree(id, Tokens(64));
  }
  CHECK(pools.manager.high_water(0) == 4);
  CHECK(pools.manager.touched_bytes() == 4 * pools.cache.groups()[0].bytes_per_block());
}

TEST_CASE("wrong calls throw InternalError") {
  Pools pools({0}, {8});
  CHECK_THROWS_AS(pools.manager.Create(1, {}), InternalError);
  pools.manager.Create(1, Tokens(10));
  CHECK_THROWS_AS(pools.manager.Create(1, Tokens(10)), InternalError);
  CHECK_THROWS_AS(pools.manager.Commit(1, Tokens(10)), InternalError);  // no slots
  CHECK_THROWS_AS(pools.manager.FreeDataAndScaleBlocks(2), InternalError);
  CHECK_THROWS_AS(pools.manager.BlockTable(9, 0), InternalError);
  REQUIRE(pools.Compute(1, Tokens(10)));
  CHECK_THROWS_AS(pools.manager.Commit(1, Tokens(9)), InternalError);
}

TEST_CASE("CheckIntegrity finds a bad scale byte in a committed block") {
  Pools pools({0}, {8});
  pools.RunAndFree(1, Tokens(40));
  *(pools.manager.GetScaleBlockPtr(1) + 5) = std::byte{0x7F};
  CHECK_THROWS_AS(pools.manager.CheckIntegrity(), InternalError);
  CHECK_NOTHROW(pools.manager.CheckIntegrity(false));
}

TEST_CASE("BlockManager rejects calls that break its requirements") {
  BlockManager manager(2);
  const int a = manager.Allocate();
  CHECK(manager.Allocate() == 1);
  CHECK(manager.Allocate() == -1);
  manager.Keep(a);
  manager.Lock(a);
  manager.Unlock(a);
  manager.Unlock(a);
  CHECK(manager.OldestCached() == a);
  CHECK_THROWS_AS(manager.Unlock(a), InternalError);
  CHECK_THROWS_AS(manager.Keep(a), InternalError);
  CHECK_THROWS_AS(manager.Drop(1), InternalError);
  CHECK_THROWS_AS(manager.Lock(2), InternalError);
  CHECK_THROWS_AS(manager.Lock(-1), InternalError);
  manager.CheckIntegrity();
  manager.Drop(a);
  CHECK_THROWS_AS(manager.Lock(a), InternalError);
  CHECK(manager.free() == 1);
  manager.CheckIntegrity();
}

TEST_CASE("spare blocks are evicted before others, each kind least recently used first") {
  BlockManager manager(6);
  for (int i = 0; i < 6; ++i) {
    CHECK(manager.Allocate() == i);
  }
  CHECK_THROWS_AS(manager.MarkSpare(0), InternalError);  // not kept
  for (int i = 0; i < 6; ++i) {
    manager.Keep(i);
  }
  manager.MarkSpare(4);
  for (int i = 0; i < 6; ++i) {
    manager.Unlock(i);
  }
  manager.CheckIntegrity();
  CHECK(manager.OldestCached() == 4);
  manager.MarkSpare(2);  // marked while cached
  manager.MarkSpare(2);
  manager.Lock(4);
  CHECK(manager.OldestCached() == 2);
  manager.Unlock(4);
  CHECK_THROWS_AS(manager.ClearSpare(4), InternalError);  // not active
  manager.MarkSpare(5);
  manager.Lock(5);
  manager.ClearSpare(5);
  manager.Unlock(5);
  manager.CheckIntegrity();
  for (const int id : {2, 4, 0, 1, 3, 5}) {
    CHECK(manager.OldestCached() == id);
    manager.Drop(id);
    manager.CheckIntegrity();
  }
  CHECK(manager.OldestCached() == -1);
  CHECK(manager.free() == 6);
  // A block that is allocated again is no longer spare.
  const int id = manager.Allocate();
  manager.Keep(id);
  manager.Unlock(id);
  manager.CheckIntegrity();
}

}  // namespace
}  // namespace turbomind
