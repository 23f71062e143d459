#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "turbomind/kv/sequence_manager.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kv/memory_device.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int kLength = 16;

std::vector<int32_t> Tokens(int n, int first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

KvCacheConfig PoolConfig(const std::vector<int>& windows, int block_seq_len = kLength,
                         HotTokens hot = {}) {
  KvCacheConfig config =
      MakeKvCacheConfig(windows, KvCacheMode::kFp4Nv, 1, 16, block_seq_len, DataType::kBFloat16);
  config.hot = hot;
  return config;
}

struct Pools {
  explicit Pools(std::vector<int> windows, std::vector<int64_t> num_blocks, bool prefix = true)
      : Pools(PoolConfig(windows), num_blocks, prefix) {}
  Pools(const KvCacheConfig& config, std::vector<int64_t> num_blocks, bool prefix = true)
      : cache(device, config, num_blocks), manager(cache, prefix) {
    for (int group = 0; group < cache.num_groups(); ++group) {
      std::memset(cache.GetScaleBlockPtr(group, 0), 1,
                  static_cast<size_t>(cache.scale_bytes(group)));
    }
  }

  // Computes tokens[from..] of a sequence in chunks.
  bool Compute(uint64_t id, const std::vector<int32_t>& tokens, int64_t chunk = 1000) {
    const auto total = static_cast<int64_t>(tokens.size());
    while (manager.num_written(id) < total) {
      const int64_t next = std::min(total, manager.num_written(id) + chunk);
      if (!manager.AllocateDataAndScaleBlocks(id, next)) {
        return false;
      }
      manager.Commit(id, std::span(tokens).first(static_cast<size_t>(next)));
      manager.CheckIntegrity();
    }
    return true;
  }

  void RunAndFree(uint64_t id, const std::vector<int32_t>& tokens, int64_t chunk = 1000) {
    manager.Create(id, tokens);
    REQUIRE(Compute(id, tokens, chunk));
    manager.FreeDataAndScaleBlocks(id);
    manager.CheckIntegrity();
  }

  MemoryDevice device;
  KvCache cache;
  SequenceManager manager;
};

TEST_CASE("a hit is every committed whole block, but never the whole prompt") {
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
  CHECK(pools.manager.Create(101, Tokens(100), false) == 0);  // asked not to look
  std::vector<int32_t> late = Tokens(100);
  late[50] = -1;
  CHECK(pools.manager.Create(102, late) == 48);
}

TEST_CASE("a hit shares blocks of the full group and only the visible ones of a window") {
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

TEST_CASE("a window's blocks behind it are freed while the sequence grows") {
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

TEST_CASE("a window that lost one block shortens the hit to where all of it is there") {
  Pools pools({0, 32}, {64, 8});
  pools.RunAndFree(1, Tokens(113), 16);  // 7 blocks, all cached in both groups
  CHECK(pools.manager.counts(1).cached == 7);
  // Takes the free block of the window group and evicts the oldest cached ones.
  pools.manager.Create(2, Tokens(64, 5000));
  REQUIRE(pools.Compute(2, Tokens(64, 5000)));
  CHECK(pools.manager.counts(1).cached > 0);
  const int64_t hit = pools.manager.Create(3, Tokens(113));
  pools.manager.CheckIntegrity();
  CHECK(hit == 112);  // the oldest went first: the end of the prefix still has its window
  pools.manager.FreeDataAndScaleBlocks(3);
  CHECK(pools.manager.Create(4, Tokens(33)) == 0);  // its beginning has not
  CHECK(pools.manager.counts(0).cached == 7);
}

TEST_CASE("growing is all or nothing, and evicts only what nobody uses") {
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
  CHECK(pools.manager.AllocateDataAndScaleBlocks(3, 10));  // fewer than it has: nothing to do
  pools.manager.CheckIntegrity();
  CHECK(pools.manager.CanEverFit(160, 16));
  CHECK_FALSE(pools.manager.CanEverFit(161, 16));
}

TEST_CASE("a preempted sequence finds what it had committed") {
  Pools pools({0}, {16});
  pools.manager.Create(1, Tokens(70));
  REQUIRE(pools.Compute(1, Tokens(70)));
  pools.manager.FreeDataAndScaleBlocks(1);
  CHECK(pools.manager.Create(1, Tokens(70)) == 64);
}

TEST_CASE("slots that were never written are not found") {
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

TEST_CASE("two sequences that compute the same prompt at once keep their own blocks") {
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

TEST_CASE("evicting the root of a prefix that another sequence goes on with") {
  Pools pools({0}, {12});
  const std::vector<int32_t> tokens = Tokens(64);
  pools.manager.Create(1, tokens);
  pools.manager.Create(2, Tokens(96));
  REQUIRE(pools.Compute(1, tokens));
  REQUIRE(pools.Compute(2, Tokens(80)));  // 4 of its own, the 5th under those of sequence 1
  pools.manager.FreeDataAndScaleBlocks(1);
  pools.manager.Create(3, Tokens(112, 9000));
  REQUIRE(pools.Compute(3, Tokens(112, 9000)));  // takes all that is left
  CHECK(pools.manager.counts(0).cached == 0);
  pools.manager.FreeDataAndScaleBlocks(3);
  REQUIRE(pools.Compute(2, Tokens(96)));  // enters its own blocks from the root
  pools.manager.FreeDataAndScaleBlocks(2);
  CHECK(pools.manager.Create(4, Tokens(97)) == 96);
  pools.manager.CheckIntegrity();
}

TEST_CASE("a fork is a copy of its own") {
  Pools pools({0, 40}, {32, 32});
  pools.manager.Create(1, Tokens(100));
  REQUIRE(pools.Compute(1, Tokens(100), 20));
  for (int group = 0; group < 2; ++group) {
    for (const int32_t block : pools.manager.BlockTable(1, group)) {
      if (block >= 0) {
        *pools.manager.GetBlockPtr(block, group) = static_cast<std::byte>(block + 100);
        *pools.manager.GetScaleBlockPtr(block, group) = static_cast<std::byte>(block + 1);
      }
    }
  }
  REQUIRE(pools.manager.Fork(1, 2));
  pools.manager.CheckIntegrity();
  CHECK(pools.manager.num_written(2) == 100);
  for (int group = 0; group < 2; ++group) {
    const auto from = pools.manager.BlockTable(1, group);
    const auto to = pools.manager.BlockTable(2, group);
    REQUIRE(from.size() == to.size());
    for (size_t i = 0; i < from.size(); ++i) {
      REQUIRE((from[i] < 0) == (to[i] < 0));
      if (from[i] >= 0) {
        CHECK(from[i] != to[i]);
        CHECK(*pools.manager.GetBlockPtr(to[i], group) == static_cast<std::byte>(from[i] + 100));
        CHECK(*pools.manager.GetScaleBlockPtr(to[i], group) == static_cast<std::byte>(from[i] + 1));
      }
    }
  }
  REQUIRE(pools.Compute(2, Tokens(130), 7));
  int copies = 2;
  while (pools.manager.Fork(1, static_cast<uint64_t>(copies) + 1)) {
    ++copies;
  }
  CHECK(copies == 4);  // 7 + 9 + 7 + 7 of 32 blocks
  pools.manager.CheckIntegrity();
}

TEST_CASE("clearing drops what is cached and leaves what runs") {
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

TEST_CASE("fresh blocks are touched last") {
  Pools pools({0}, {100}, false);
  for (uint64_t id = 1; id < 20; ++id) {
    pools.RunAndFree(id, Tokens(64));
  }
  CHECK(pools.manager.high_water(0) == 4);
  CHECK(pools.manager.touched_bytes() == 4 * pools.cache.groups()[0].bytes_per_block());
}

TEST_CASE("wrong use is found") {
  Pools pools({0}, {8});
  CHECK_THROWS_AS(pools.manager.Create(1, {}), InternalError);
  pools.manager.Create(1, Tokens(10));
  CHECK_THROWS_AS(pools.manager.Create(1, Tokens(10)), InternalError);
  CHECK_THROWS_AS(pools.manager.Commit(1, Tokens(10)), InternalError);  // no slots
  CHECK_THROWS_AS(pools.manager.FreeDataAndScaleBlocks(2), InternalError);
  CHECK_THROWS_AS(pools.manager.Fork(2, 3), InternalError);
  CHECK_THROWS_AS(pools.manager.BlockTable(9, 0), InternalError);
  REQUIRE(pools.Compute(1, Tokens(10)));
  CHECK_THROWS_AS(pools.manager.Commit(1, Tokens(9)), InternalError);
}

TEST_CASE("a bad scale byte in a committed block is found") {
  Pools pools({0}, {8});
  pools.RunAndFree(1, Tokens(40));
  *(pools.manager.GetScaleBlockPtr(1) + 5) = std::byte{0x7F};
  CHECK_THROWS_AS(pools.manager.CheckIntegrity(), InternalError);
  CHECK_NOTHROW(pools.manager.CheckIntegrity(false));
}

TEST_CASE("the managers' own check and requirements") {
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

// --- Hot blocks ----------------------------------------------------------------------------------

// Which blocks of a pool's table are there, a character for each: '#' or '.'.
std::string Present(const SequenceManager& manager, uint64_t id, int pool) {
  std::string present;
  for (const int32_t block : manager.BlockTable(id, pool)) {
    present += block >= 0 ? '#' : '.';
  }
  return present;
}

// The blocks that the step planned last moves, by index in the tables.
std::vector<int64_t> Moved(const SequenceManager& manager, uint64_t id, int group, int num_groups) {
  const auto cold = manager.BlockTable(id, group);
  const auto hot = manager.BlockTable(id, num_groups + group);
  std::vector<int64_t> indices;
  for (const BlockMove& move : manager.Moves(id, group)) {
    const auto at = std::find(cold.begin(), cold.end(), move.cold) - cold.begin();
    REQUIRE(at < static_cast<int64_t>(cold.size()));
    CHECK(hot[static_cast<size_t>(at)] == move.hot);
    indices.push_back(at);
  }
  return indices;
}

// One token after the other: a block is hot when it is written, is quantised in the step of the
// first query for which it is none of the recent ones, and leaves the hot pool after that step.
TEST_CASE("the life of a block, at every edge") {
  for (const int length : {16, 32, 64, 128}) {
    for (const HotTokens& tokens : {HotTokens{64, 64}, {0, 64}, {64, 0}, {0, 0}, {128, 192}}) {
      for (const int window : {0, 2 * length, 300}) {
        Pools pools(PoolConfig({window}, length, tokens), {64, 64}, false);
        const LayerGroup& group = pools.cache.groups().front();
        const HotRule& rule = pools.cache.rule();
        const auto all = Tokens(9 * length);
        pools.manager.Create(1, all);
        for (int64_t n = 0; n < 8 * length; ++n) {
          REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, n + 1));
          // The query at n is the step's only one.
          const bool begins_block = n % length == 0;
          const int64_t leaves = n / length - rule.recent_blocks - 1;
          const bool moves =
              begins_block && leaves >= rule.sink_blocks && leaves >= group.FirstVisibleBlock(n);
          const auto expected = moves ? std::vector<int64_t>{leaves} : std::vector<int64_t>();
          REQUIRE(Moved(pools.manager, 1, 0, 1) == expected);
          for (int64_t b = group.FirstVisibleBlock(n); b <= n / length; ++b) {
            const int pool = rule.IsHot(b, n) ? 1 : 0;
            REQUIRE(pools.manager.BlockTable(1, pool)[static_cast<size_t>(b)] >= 0);
          }
          pools.manager.Commit(1, std::span(all).first(static_cast<size_t>(n + 1)));
          REQUIRE(pools.manager.Moves(1, 0).empty());
          REQUIRE(pools.manager.counts(0).active == group.ColdBlocksHeld(n + 1));
          REQUIRE(pools.manager.counts(1).active == group.HotBlocksHeld(n + 1));
          pools.manager.CheckIntegrity();
        }
      }
    }
  }
}

TEST_CASE("a chunk moves all blocks that its last query sees cold, those it wrote included") {
  Pools pools(PoolConfig({0, 40}, kLength, {64, 64}), {32, 32, 32, 32});
  const auto all = Tokens(400);
  pools.manager.Create(1, all);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 200));  // 13 blocks, the last query in 12
  CHECK(Moved(pools.manager, 1, 0, 2) == std::vector<int64_t>{4, 5, 6, 7});
  CHECK(Moved(pools.manager, 1, 1, 2).empty());  // 40 tokens are within the recent blocks
  CHECK(Present(pools.manager, 1, 0) == "....####.....");
  CHECK(Present(pools.manager, 1, 2) == "#############");
  pools.manager.Commit(1, std::span(all).first(200));
  CHECK(Present(pools.manager, 1, 2) == "####....#####");
  CHECK(Present(pools.manager, 1, 3) == "..........###");
  CHECK(Present(pools.manager, 1, 1) == ".............");
  pools.manager.CheckIntegrity();
}

TEST_CASE("a step that is planned anew, shorter or longer, moves what it needs") {
  Pools pools(PoolConfig({0}, kLength, {0, 0}), {32, 32});
  const auto all = Tokens(400);
  pools.manager.Create(1, all);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 100));
  CHECK(Moved(pools.manager, 1, 0, 1) == std::vector<int64_t>{0, 1, 2, 3, 4, 5});
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 40));
  CHECK(Moved(pools.manager, 1, 0, 1) == std::vector<int64_t>{0, 1});
  pools.manager.CheckIntegrity();
  CHECK_THROWS_AS(pools.manager.Commit(1, std::span(all).first(41)), InternalError);
  pools.manager.Commit(1, std::span(all).first(40));
  CHECK(Present(pools.manager, 1, 0) == "##.....");
  CHECK(Present(pools.manager, 1, 1) == "..#####");  // 3 to 6 are slots without tokens
  pools.manager.CheckIntegrity();
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 120));
  CHECK(Moved(pools.manager, 1, 0, 1) == std::vector<int64_t>{2, 3, 4, 5, 6});
  pools.manager.FreeDataAndScaleBlocks(1);
  CHECK(pools.manager.counts(0).cached == 2);
  CHECK(pools.manager.counts(1).cached == 2);
  CHECK(pools.manager.counts(0).active + pools.manager.counts(1).active == 0);
}

TEST_CASE("growing is all or nothing over both kinds of pools") {
  Pools pools(PoolConfig({0}, kLength, {0, 0}), {4, 9}, false);
  const auto all = Tokens(400);
  pools.manager.Create(1, all);
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(1, 6 * kLength));  // 5 cold
  CHECK(pools.manager.counts(1).active == 0);
  CHECK(pools.manager.BlockTable(1, 1).empty());
  CHECK(pools.manager.Moves(1, 0).empty());
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 5 * kLength));
  pools.manager.Create(2, all);
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(2, 5 * kLength));  // 5 hot of 4
  CHECK(pools.manager.counts(0).active == 4);
  CHECK(pools.manager.CanEverFit(5 * kLength, 1000));
  CHECK_FALSE(pools.manager.CanEverFit(5 * kLength + 1, 16));
}

TEST_CASE("prefix hits take hot and cold places, and quantise nothing twice") {
  Pools pools(PoolConfig({0}, kLength, {64, 64}), {64, 64});
  pools.RunAndFree(1, Tokens(300));  // 18 whole blocks; 14 to 17 were never quantised
  CHECK(pools.manager.counts(0).cached == 10);
  CHECK(pools.manager.counts(1).cached == 18);
  CHECK(pools.manager.Create(2, Tokens(177)) == 176);  // 11 blocks
  CHECK(pools.manager.num_cut(2) == 0);
  CHECK(Present(pools.manager, 2, 0) == "....#######");  // the recent ones too
  CHECK(Present(pools.manager, 2, 1) == "####...####");
  auto other = Tokens(200);
  other[180] = -1;
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(2, 193));
  CHECK(pools.manager.Moves(2, 0).empty());  // 7 has left, as 8 has: both were found cold
  pools.manager.Commit(2, std::span(other).first(193));
  CHECK(Present(pools.manager, 2, 1) == "####....#####");
  pools.manager.CheckIntegrity();
  // Whole: its last blocks were found hot alone and are quantised as they leave.
  CHECK(pools.manager.Create(3, Tokens(320)) == 288);
  REQUIRE(pools.Compute(3, Tokens(319)));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(3, 321));
  CHECK(Moved(pools.manager, 3, 0, 1) == std::vector<int64_t>{15});
}

TEST_CASE("of what ended at a block's edge, the block that would leave next is taken hot") {
  Pools pools(PoolConfig({0}, kLength, {0, 64}), {64, 64});
  pools.RunAndFree(1, Tokens(160));  // the last query was in block 9: 5 to 9 are hot
  CHECK(pools.manager.counts(0).cached == 5);
  CHECK(pools.manager.Create(2, Tokens(161)) == 160);
  CHECK(Present(pools.manager, 2, 0) == "#####.....");
  CHECK(Present(pools.manager, 2, 1) == ".....#####");
  pools.manager.CheckIntegrity();
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(2, 161));
  CHECK(Moved(pools.manager, 2, 0, 1) == std::vector<int64_t>{5});
}

TEST_CASE("a lost 16-bit copy cuts a hit, and is lost before sinks and blocks without a twin") {
  // 18 hot copies of one prompt, 12 of which have a twin, and no free hot block but one.
  Pools pools(PoolConfig({0}, kLength, {32 * 2, 64}), {64, 20});
  pools.RunAndFree(1, Tokens(300), 16);
  CHECK(pools.manager.counts(0).cached == 10);
  CHECK(pools.manager.counts(1).cached == 18);
  // Needs 4 hot blocks: 2 are free, the two oldest copies of quantised blocks leave.
  pools.manager.Create(2, Tokens(60, 5000));
  REQUIRE(pools.Compute(2, Tokens(60, 5000)));
  CHECK(pools.manager.counts(1).cached == 16);
  CHECK(pools.manager.counts(0).cached == 10);
  // 4 and 5 were quantised first.
  CHECK(pools.manager.Create(3, Tokens(300)) == 288);
  CHECK(pools.manager.num_cut(3) == 0);
  pools.manager.FreeDataAndScaleBlocks(3);
  CHECK(pools.manager.Create(4, Tokens(130)) == 64);  // 8 blocks found; 4 to 7 would be hot
  CHECK(pools.manager.num_cut(4) == 64);
  pools.manager.FreeDataAndScaleBlocks(4);
  CHECK(pools.manager.Create(5, Tokens(163)) == 160);  // 6 to 9 are there
  pools.manager.FreeDataAndScaleBlocks(5);
  // All copies, then what is read hot alone: the end of the prefix first, sinks last.
  pools.manager.Create(6, Tokens(160, 9000));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(6, 160));
  CHECK(pools.manager.counts(1).cached == 6);
  CHECK(pools.manager.Create(7, Tokens(300)) == 64);  // the sinks alone
  CHECK(pools.manager.num_cut(7) > 100);
  pools.manager.CheckIntegrity();
}

TEST_CASE("computing what was cut brings the copies back") {
  Pools pools(PoolConfig({0}, kLength, {64, 64}), {64, 20});
  pools.RunAndFree(1, Tokens(300), 16);
  pools.RunAndFree(2, Tokens(160, 9000), 16);
  CHECK(pools.manager.Create(3, Tokens(130)) == 64);
  REQUIRE(pools.Compute(3, Tokens(130), 16));
  pools.manager.FreeDataAndScaleBlocks(3);
  CHECK(pools.manager.Create(4, Tokens(130)) == 128);
  CHECK(pools.manager.num_cut(4) == 0);
  pools.manager.CheckIntegrity();
}

TEST_CASE("sinks of a window are freed like others; a short window never quantises") {
  Pools pools(PoolConfig({40, 200}, kLength, {64, 64}), {4, 64, 64, 64}, false);
  const auto all = Tokens(600);
  pools.manager.Create(1, all);
  int64_t moves[2] = {0, 0};
  for (int64_t n = 7; n <= 595; n += 7) {
    REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, n));
    for (int group : {0, 1}) {
      moves[group] += static_cast<int64_t>(pools.manager.Moves(1, group).size());
    }
    pools.manager.Commit(1, std::span(all).first(static_cast<size_t>(n)));
    pools.manager.CheckIntegrity();
  }
  CHECK(moves[0] == 0);
  CHECK(moves[1] == 595 / kLength - 4 - 4);  // each block once, but sinks and the newest
  CHECK(pools.manager.high_water(0) == 0);
  // 595 tokens: the next query sees from 396 on, block 24; hot are 33 to 37.
  CHECK(Present(pools.manager, 1, 1) == std::string(24, '.') + "#########" + ".....");
  CHECK(Present(pools.manager, 1, 3) == std::string(33, '.') + "#####");
  CHECK(Present(pools.manager, 1, 2) == std::string(34, '.') + "####");
}

TEST_CASE("a fork has hot and cold blocks of its own, and no half-made ones") {
  Pools pools(PoolConfig({0}, kLength, {64, 0}), {32, 32});
  const auto all = Tokens(400);
  pools.manager.Create(1, all);
  REQUIRE(pools.Compute(1, Tokens(135), 20));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 150));  // block 8 gets a cold slot
  CHECK(Present(pools.manager, 1, 0) == "....#####.");
  for (int pool : {0, 1}) {
    for (const int32_t block : pools.manager.BlockTable(1, pool)) {
      if (block >= 0) {
        *pools.manager.GetBlockPtr(block, pool) = static_cast<std::byte>(block + 50 * pool);
      }
    }
  }
  REQUIRE(pools.manager.Fork(1, 2));
  pools.manager.CheckIntegrity();
  CHECK(Present(pools.manager, 2, 0) == "....####.");
  CHECK(Present(pools.manager, 2, 1) == "####....#");
  for (int pool : {0, 1}) {
    const auto from = pools.manager.BlockTable(1, pool);
    const auto to = pools.manager.BlockTable(2, pool);
    for (size_t i = 0; i < to.size(); ++i) {
      if (to[i] >= 0) {
        CHECK(to[i] != from[i]);
        CHECK(*pools.manager.GetBlockPtr(to[i], pool) ==
              static_cast<std::byte>(from[i] + 50 * pool));
      }
    }
  }
  REQUIRE(pools.Compute(2, Tokens(200), 9));
  CHECK(pools.manager.num_written(1) == 135);
}

TEST_CASE("what is said to come is enough, whoever holds the recent blocks") {
  Pools pools(PoolConfig({0}, kLength, {64, 64}), {64, 64});
  pools.RunAndFree(1, Tokens(300));
  const auto prompt = Tokens(300);
  pools.manager.Create(2, prompt);
  pools.manager.Create(3, prompt);  // shares everything with 2
  std::vector<int32_t> longer = Tokens(288);
  for (int32_t i = 0; i < 200; ++i) {
    longer.push_back(-i - 1);
  }
  for (const int64_t chunk : {1, 16, 50}) {
    const int64_t promised[] = {pools.manager.BlocksToCome(3, 0, 488, chunk),
                                pools.manager.BlocksToCome(3, 1, 488, chunk)};
    CHECK(promised[0] == 31 - 4 - 5 - 10);  // cold: exactly
    CHECK(promised[1] == std::min<int64_t>(13, 5 + (chunk + 15) / 16));
  }
  const int64_t active[] = {pools.manager.counts(0).active, pools.manager.counts(1).active};
  const int64_t promised = pools.manager.BlocksToCome(3, 1, 488, 50);
  int64_t most = 0;
  while (pools.manager.num_written(3) < 488) {
    const int64_t n = std::min<int64_t>(pools.manager.num_written(3) + 50, 488);
    REQUIRE(pools.manager.AllocateDataAndScaleBlocks(3, n));
    most = std::max(most, pools.manager.counts(1).active - active[1]);
    pools.manager.Commit(3, std::span(longer).first(static_cast<size_t>(n)));
  }
  CHECK(most <= promised);
  CHECK(pools.manager.counts(0).active - active[0] == 31 - 4 - 5 - 10);
}

}  // namespace
}  // namespace turbomind
