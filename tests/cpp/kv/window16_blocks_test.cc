// The 16-bit window of a sequence: when its blocks are quantized and released, and how this affects
// prefix hits and sliding windows.

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kv/fits.h"
#include "kv/test_pools.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::kLength;
using testing::PoolConfig;
using testing::Pools;
using testing::Tokens;

// Returns one character per entry of a pool's block table: '#' for a block, '.' for none.
std::string Present(const SequenceManager& manager, uint64_t id, int pool) {
  std::string present;
  for (const int32_t block : manager.BlockTable(id, pool)) {
    present += block >= 0 ? '#' : '.';
  }
  return present;
}

// Returns the table indices of the blocks that the last planned step quantizes.
std::vector<int64_t> Quantized(const SequenceManager& manager, uint64_t id, int group,
                               int num_groups) {
  const auto quantized = manager.BlockTable(id, group);
  const auto window16 = manager.BlockTable(id, num_groups + group);
  std::vector<int64_t> indices;
  for (const PendingQuantization& pending : manager.BlocksToQuantize(id, group)) {
    const auto at =
        std::find(quantized.begin(), quantized.end(), pending.quantized) - quantized.begin();
    REQUIRE(at < static_cast<int64_t>(quantized.size()));
    CHECK(window16[static_cast<size_t>(at)] == pending.window16);
    indices.push_back(at);
  }
  return indices;
}

// Tokens are added one by one. A block is written to the 16-bit pool. It is quantized in the step
// of the first query for which it is not recent, and leaves the 16-bit pool after that step.
TEST_CASE("a block is quantized when it leaves the 16-bit window, at every block edge") {
  for (const int length : {16, 32, 64, 128}) {
    for (const PrecisionWindowTokens& tokens :
         {PrecisionWindowTokens{64, 64}, {0, 64}, {64, 0}, {0, 0}, {128, 192}}) {
      for (const int window : {0, 2 * length, 300}) {
        Pools pools(PoolConfig({window}, length, tokens), {64, 64}, false);
        const LayerGroup& group = pools.cache.groups().front();
        const PrecisionWindow& rule = pools.cache.rule(0);
        const auto all = Tokens(9 * length);
        pools.manager.Create(1, all);
        for (int64_t n = 0; n < 8 * length; ++n) {
          REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, n + 1));
          // The step has one query, at position n.
          const bool begins_block = n % length == 0;
          const int64_t leaves = n / length - rule.recent_blocks - 1;
          const bool blocks_to_quantize =
              begins_block && leaves >= rule.sink_blocks && leaves >= group.FirstVisibleBlock(n);
          const auto expected =
              blocks_to_quantize ? std::vector<int64_t>{leaves} : std::vector<int64_t>();
          REQUIRE(Quantized(pools.manager, 1, 0, 1) == expected);
          for (int64_t b = group.FirstVisibleBlock(n); b <= n / length; ++b) {
            const int pool = rule.IsInWindow16(b, n) ? 1 : 0;
            REQUIRE(pools.manager.BlockTable(1, pool)[static_cast<size_t>(b)] >= 0);
          }
          pools.manager.Commit(1, std::span(all).first(static_cast<size_t>(n + 1)));
          REQUIRE(pools.manager.BlocksToQuantize(1, 0).empty());
          REQUIRE(pools.manager.counts(0).active == group.QuantizedBlocksHeld(n + 1));
          REQUIRE(pools.manager.counts(1).active == group.Window16BlocksHeld(n + 1));
          pools.manager.CheckIntegrity();
        }
      }
    }
  }
}

TEST_CASE("a chunk quantizes all blocks outside its last query's 16-bit window, even new ones") {
  Pools pools(PoolConfig({0, 40}, kLength, {64, 64}), {32, 32, 32, 32});
  const auto all = Tokens(400);
  pools.manager.Create(1, all);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 200));  // the last query is in block 12
  CHECK(Quantized(pools.manager, 1, 0, 2) == std::vector<int64_t>{4, 5, 6, 7});
  CHECK(Quantized(pools.manager, 1, 1, 2).empty());  // the recent blocks cover 40 tokens
  CHECK(Present(pools.manager, 1, 0) == "....####.....");
  CHECK(Present(pools.manager, 1, 2) == "#############");
  pools.manager.Commit(1, std::span(all).first(200));
  CHECK(Present(pools.manager, 1, 2) == "####....#####");
  CHECK(Present(pools.manager, 1, 3) == "..........###");
  CHECK(Present(pools.manager, 1, 1) == ".............");
  pools.manager.CheckIntegrity();
}

TEST_CASE("a step that is planned again with another length quantizes only what it needs") {
  Pools pools(PoolConfig({0}, kLength, {0, 0}), {32, 32});
  const auto all = Tokens(400);
  pools.manager.Create(1, all);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 100));
  CHECK(Quantized(pools.manager, 1, 0, 1) == std::vector<int64_t>{0, 1, 2, 3, 4, 5});
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 40));
  CHECK(Quantized(pools.manager, 1, 0, 1) == std::vector<int64_t>{0, 1});
  pools.manager.CheckIntegrity();
  CHECK_THROWS_AS(pools.manager.Commit(1, std::span(all).first(41)), InternalError);
  pools.manager.Commit(1, std::span(all).first(40));
  CHECK(Present(pools.manager, 1, 0) == "##.....");
  CHECK(Present(pools.manager, 1, 1) == "..#####");  // blocks 3 to 6 have slots without tokens
  pools.manager.CheckIntegrity();
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 120));
  CHECK(Quantized(pools.manager, 1, 0, 1) == std::vector<int64_t>{2, 3, 4, 5, 6});
  pools.manager.FreeDataAndScaleBlocks(1);
  CHECK(pools.manager.counts(0).cached == 2);
  CHECK(pools.manager.counts(1).cached == 2);
  CHECK(pools.manager.counts(0).active + pools.manager.counts(1).active == 0);
}

TEST_CASE("allocation is all or nothing across quantized and 16-bit pools") {
  Pools pools(PoolConfig({0}, kLength, {0, 0}), {4, 9}, false);
  const auto all = Tokens(400);
  pools.manager.Create(1, all);
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(1, 6 * kLength));  // lacks a quantized block
  CHECK(pools.manager.counts(1).active == 0);
  CHECK(pools.manager.BlockTable(1, 1).empty());
  CHECK(pools.manager.BlocksToQuantize(1, 0).empty());
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 5 * kLength));
  pools.manager.Create(2, all);
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(2, 5 * kLength));  // lacks a 16-bit block
  CHECK(pools.manager.counts(0).active == 4);
  CHECK(testing::Fits(pools.cache, 5 * kLength, 1000));
  CHECK_FALSE(testing::Fits(pools.cache, 5 * kLength + 1, 16));
}

TEST_CASE("a prefix hit reuses 16-bit and quantized blocks and quantizes none twice") {
  Pools pools(PoolConfig({0}, kLength, {64, 64}), {64, 64});
  pools.RunAndFree(1, Tokens(300));  // 18 whole blocks, 10 of them quantized: 4 to 13
  CHECK(pools.manager.counts(0).cached == 10);
  CHECK(pools.manager.counts(1).cached == 18);
  CHECK(pools.manager.Create(2, Tokens(177)) == 176);  // 11 blocks
  CHECK(pools.manager.num_cut(2) == 0);
  CHECK(Present(pools.manager, 2, 0) == "....#######");  // the recent blocks too
  CHECK(Present(pools.manager, 2, 1) == "####...####");
  auto other = Tokens(200);
  other[180] = -1;
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(2, 193));
  CHECK(
      pools.manager.BlocksToQuantize(2, 0).empty());  // 7 left the window, but was found quantized
  pools.manager.Commit(2, std::span(other).first(193));
  CHECK(Present(pools.manager, 2, 1) == "####....#####");
  pools.manager.CheckIntegrity();
  // The hit found the last blocks only in 16 bits, so they are quantized when they leave the
  // window.
  CHECK(pools.manager.Create(3, Tokens(320)) == 288);
  REQUIRE(pools.Compute(3, Tokens(319)));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(3, 321));
  CHECK(Quantized(pools.manager, 3, 0, 1) == std::vector<int64_t>{15});
}

TEST_CASE("a hit at a block edge takes a block not yet quantized from the 16-bit pool") {
  Pools pools(PoolConfig({0}, kLength, {0, 64}), {64, 64});
  pools.RunAndFree(1, Tokens(160));  // the last query was in block 9, so 5 to 9 are in 16 bits
  CHECK(pools.manager.counts(0).cached == 5);
  CHECK(pools.manager.Create(2, Tokens(161)) == 160);
  CHECK(Present(pools.manager, 2, 0) == "#####.....");
  CHECK(Present(pools.manager, 2, 1) == ".....#####");
  pools.manager.CheckIntegrity();
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(2, 161));
  CHECK(Quantized(pools.manager, 2, 0, 1) == std::vector<int64_t>{5});
}

TEST_CASE("an evicted 16-bit copy shortens a hit; copies go before sinks and unquantized blocks") {
  // The 16-bit pool caches 18 blocks of one prompt. Ten of them also have a quantized copy, and two
  // blocks are free.
  Pools pools(PoolConfig({0}, kLength, {32 * 2, 64}), {64, 20});
  pools.RunAndFree(1, Tokens(300), 16);
  CHECK(pools.manager.counts(0).cached == 10);
  CHECK(pools.manager.counts(1).cached == 18);
  // This needs four 16-bit blocks. Two are free; the two oldest copies of quantized blocks are
  // evicted.
  pools.manager.Create(2, Tokens(60, 5000));
  REQUIRE(pools.Compute(2, Tokens(60, 5000)));
  CHECK(pools.manager.counts(1).cached == 16);
  CHECK(pools.manager.counts(0).cached == 10);
  // The evicted copies are those of blocks 4 and 5, which were quantized first.
  CHECK(pools.manager.Create(3, Tokens(300)) == 288);
  CHECK(pools.manager.num_cut(3) == 0);
  pools.manager.FreeDataAndScaleBlocks(3);
  CHECK(pools.manager.Create(4, Tokens(130)) == 64);  // finds 8 blocks, but needs 4 to 7 in 16 bits
  CHECK(pools.manager.num_cut(4) == 64);
  pools.manager.FreeDataAndScaleBlocks(4);
  CHECK(pools.manager.Create(5, Tokens(163)) == 160);  // finds 6 to 9 in 16 bits
  pools.manager.FreeDataAndScaleBlocks(5);
  // All copies are evicted first. Then follow the blocks that exist only in 16 bits, from the end
  // of the prefix; the sinks come last.
  pools.manager.Create(6, Tokens(160, 9000));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(6, 160));
  CHECK(pools.manager.counts(1).cached == 6);
  CHECK(pools.manager.Create(7, Tokens(300)) == 64);  // only the sinks
  CHECK(pools.manager.num_cut(7) > 100);
  pools.manager.CheckIntegrity();
}

TEST_CASE("16-bit copies that served a hit are evicted after those that did not") {
  enum class Hit { kNone, kRefused, kServed };
  for (const Hit hit : {Hit::kNone, Hit::kRefused, Hit::kServed}) {
    Pools pools(PoolConfig({0}, kLength, {64, 64}), {64, 24});
    pools.RunAndFree(1, Tokens(300), 16);
    if (hit != Hit::kNone) {
      CHECK(pools.manager.Create(2, Tokens(163)) == 160);  // a shorter prompt with the same prefix
      if (hit == Hit::kServed) {
        REQUIRE(pools.manager.AllocateDataAndScaleBlocks(2, 161));
      }
      pools.manager.FreeDataAndScaleBlocks(2);
    }
    pools.RunAndFree(3, Tokens(240, 9000), 16);  // evicts all copies that served no hit
    CHECK(pools.manager.Create(4, Tokens(163)) == (hit == Hit::kServed ? 160 : 64));
    pools.manager.CheckIntegrity();
  }
}

TEST_CASE("computing the cut part of a hit restores its 16-bit copies") {
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

TEST_CASE("a sliding window frees its sinks like other blocks; a short one quantizes nothing") {
  Pools pools(PoolConfig({40, 200}, kLength, {64, 64}), {4, 64, 64, 64}, false);
  const auto all = Tokens(600);
  pools.manager.Create(1, all);
  int64_t blocks_to_quantize[2] = {0, 0};
  for (int64_t n = 7; n <= 595; n += 7) {
    REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, n));
    for (int group : {0, 1}) {
      blocks_to_quantize[group] +=
          static_cast<int64_t>(pools.manager.BlocksToQuantize(1, group).size());
    }
    pools.manager.Commit(1, std::span(all).first(static_cast<size_t>(n)));
    pools.manager.CheckIntegrity();
  }
  CHECK(blocks_to_quantize[0] == 0);
  CHECK(blocks_to_quantize[1] ==
        595 / kLength - 4 - 4);  // each block once, but no sinks or newest blocks
  CHECK(pools.manager.high_water(0) == 0);
  // After 595 tokens the next query sees positions from 396 on, which is block 24. Blocks 33 to 37
  // are in the 16-bit window.
  CHECK(Present(pools.manager, 1, 1) == std::string(24, '.') + "#########" + ".....");
  CHECK(Present(pools.manager, 1, 3) == std::string(33, '.') + "#####");
  CHECK(Present(pools.manager, 1, 2) == std::string(34, '.') + "####");
}

TEST_CASE("BlocksToCome is an upper bound, even if another sequence shares the recent blocks") {
  Pools pools(PoolConfig({0}, kLength, {64, 64}), {64, 64});
  pools.RunAndFree(1, Tokens(300));
  const auto prompt = Tokens(300);
  pools.manager.Create(2, prompt);
  pools.manager.Create(3, prompt);  // shares all its blocks with 2
  std::vector<int32_t> longer = Tokens(288);
  for (int32_t i = 0; i < 200; ++i) {
    longer.push_back(-i - 1);
  }
  for (const int64_t chunk : {1, 16, 50}) {
    const int64_t promised[] = {pools.manager.BlocksToCome(3, 0, 488, chunk),
                                pools.manager.BlocksToCome(3, 1, 488, chunk)};
    CHECK(promised[0] == 31 - 4 - 5 - 10);  // exact in the quantized pool
    CHECK(promised[1] == std::min<int64_t>(13, 5 + (chunk + 15) / 16));
  }
  const int64_t active[] = {pools.manager.counts(0).active, pools.manager.counts(1).active};
  const int64_t promised = pools.manager.BlocksToCome(3, 1, 488, 50);
  int64_t max_added = 0;
  while (pools.manager.num_written(3) < 488) {
    const int64_t n = std::min<int64_t>(pools.manager.num_written(3) + 50, 488);
    REQUIRE(pools.manager.AllocateDataAndScaleBlocks(3, n));
    max_added = std::max(max_added, pools.manager.counts(1).active - active[1]);
    pools.manager.Commit(3, std::span(longer).first(static_cast<size_t>(n)));
  }
  CHECK(max_added <= promised);
  CHECK(pools.manager.counts(0).active - active[0] == 31 - 4 - 5 - 10);
}

}  // namespace
}  // namespace turbomind
