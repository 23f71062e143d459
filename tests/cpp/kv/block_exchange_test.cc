// Copies of cached blocks: what leaves one cache and enters another, and what is refused.

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "kv/test_pools.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::kLength;
using testing::PoolConfig;
using testing::Pools;
using testing::Tokens;

constexpr PrecisionWindowTokens kWindow16 = {64, 64};

// Fills the data of every pool with random bytes. The scales stay legal.
void FillData(Pools& pools, uint32_t seed) {
  std::mt19937 random(seed);
  for (int pool = 0; pool < pools.cache.num_pools(); ++pool) {
    std::byte* data = pools.cache.GetBlockPtr(pool, 0);
    for (int64_t i = 0; i < pools.cache.data_bytes(pool); ++i) {
      data[i] = static_cast<std::byte>(random() >> 24);
    }
  }
}

// REQUIRES: the copies live as long as the views.
std::vector<BlockViews> ViewsOf(std::span<const BlockCopies> copies) {
  std::vector<BlockViews> views;
  for (const BlockCopies& block : copies) {
    views.emplace_back(block.begin(), block.end());
  }
  return views;
}

int64_t HitOf(Pools& pools, const std::vector<int32_t>& tokens, const CacheSalt& salt = {}) {
  const int64_t cached = pools.manager.CachedTokens(tokens, salt);
  const int64_t hit = pools.manager.Create(99, tokens, true, salt);
  pools.manager.FreeDataAndScaleBlocks(99);
  pools.manager.CheckIntegrity();
  CHECK(cached == hit);
  return hit;
}

TEST_CASE("an imported prefix is a hit as long as in the cache that it comes from") {
  for (const auto& window16 : {PrecisionWindowTokens{}, kWindow16}) {
    for (const std::vector<int>& windows : {std::vector<int>{0}, {0, 8 * kLength}, {8 * kLength}}) {
      const KvCacheConfig config = PoolConfig(windows, kLength, window16);
      const std::vector<int64_t> sizes(windows.size() * (window16.sink_tokens > 0 ? 2 : 1), 32);
      Pools from(config, sizes);
      Pools to(config, sizes);
      FillData(from, 1);
      const std::vector<int32_t> tokens = Tokens(20 * kLength + 3);
      from.RunAndFree(1, tokens);
      const auto copies = from.manager.ExportBlocks(tokens, 0, 100);
      CHECK(copies.size() == 20);
      // In two parts, the second of which repeats a block.
      const std::span all(copies);
      CHECK(to.manager.ImportBlocks(tokens, 0, ViewsOf(all.first(5))) == 5);
      to.manager.CheckIntegrity();
      CHECK(to.manager.ImportBlocks(tokens, 4, ViewsOf(all.subspan(4))) == 16);
      to.manager.CheckIntegrity();
      CHECK(HitOf(to, tokens) == HitOf(from, tokens));
      CHECK(HitOf(to, tokens) > 0);
      CHECK(to.manager.ExportBlocks(tokens, 0, 100) == copies);
      CHECK(to.manager.ExportBlocks(tokens, 3, 2) ==
            std::vector(copies.begin() + 3, copies.begin() + 5));
    }
  }
}

TEST_CASE("a prefix with another salt or beginning is neither exported nor hit") {
  Pools pools({0}, {32});
  const std::vector<int32_t> tokens = Tokens(4 * kLength + 1);
  pools.RunAndFree(1, tokens);
  const CacheSalt salt = {1, 2};
  CHECK(pools.manager.ExportBlocks(tokens, 0, 9, salt).empty());
  const auto copies = pools.manager.ExportBlocks(tokens, 0, 9);
  CHECK(pools.manager.ImportBlocks(tokens, 0, ViewsOf(copies), salt) == 4);
  CHECK(HitOf(pools, tokens, salt) == 4 * kLength);
  const std::vector<int32_t> other = Tokens(4 * kLength + 1, 500);
  CHECK(pools.manager.ImportBlocks(other, 1, ViewsOf(std::span(copies).subspan(1))) == 0);
  CHECK(HitOf(pools, other) == 0);
}

TEST_CASE("an import takes the place of older prefixes, but not of its own beginning") {
  Pools from({0}, {32});
  Pools to({0}, {6});
  const std::vector<int32_t> tokens = Tokens(8 * kLength + 1);
  from.RunAndFree(1, tokens);
  const auto copies = from.manager.ExportBlocks(tokens, 0, 9);
  const std::vector<int32_t> older = Tokens(4 * kLength + 1, 500);
  to.RunAndFree(1, older);
  CHECK(to.manager.ImportBlocks(tokens, 0, ViewsOf(copies)) == 6);
  to.manager.CheckIntegrity();
  CHECK(HitOf(to, tokens) == 6 * kLength);
  CHECK(HitOf(to, older) == 0);
}

TEST_CASE("running sequences keep their blocks during an import") {
  Pools from({0}, {32});
  Pools to({0}, {6});
  const std::vector<int32_t> tokens = Tokens(8 * kLength + 1);
  from.RunAndFree(1, tokens);
  const std::vector<int32_t> running = Tokens(4 * kLength, 500);
  to.manager.Create(1, running);
  REQUIRE(to.Compute(1, running));
  CHECK(to.manager.ImportBlocks(tokens, 0, ViewsOf(from.manager.ExportBlocks(tokens, 0, 9))) == 2);
  to.manager.CheckIntegrity();
  to.manager.FreeDataAndScaleBlocks(1);
  CHECK(HitOf(to, tokens) == 2 * kLength);
}

TEST_CASE("copies of another size and illegal scales are refused") {
  Pools from({0}, {32});
  Pools to({0}, {32});
  const std::vector<int32_t> tokens = Tokens(4 * kLength + 1);
  from.RunAndFree(1, tokens);
  const auto copies = from.manager.ExportBlocks(tokens, 0, 9);
  auto wrong = copies;
  wrong[1][0].pop_back();
  CHECK_THROWS_AS(to.manager.ImportBlocks(tokens, 0, ViewsOf(wrong)), InvalidArgument);
  wrong = copies;
  wrong[1].emplace_back();
  CHECK_THROWS_AS(to.manager.ImportBlocks(tokens, 0, ViewsOf(wrong)), InvalidArgument);
  CHECK(HitOf(to, tokens) == 0);
  wrong = copies;
  wrong[2][0].back() = std::byte{0xff};  // a NaN in E4M3
  CHECK_THROWS_WITH_AS(to.manager.ImportBlocks(tokens, 0, ViewsOf(wrong)),
                       doctest::Contains("A stored block is damaged"), InvalidArgument);
  to.manager.CheckIntegrity();
  CHECK(HitOf(to, tokens) == 2 * kLength);
  CHECK(to.manager.counts(0).free == 32 - 2);
  auto empty = copies;
  empty[0][0].clear();
  CHECK(Pools({0}, {32}).manager.ImportBlocks(tokens, 0, ViewsOf(empty)) == 0);
}

TEST_CASE("without the prefix cache nothing is entered") {
  Pools from({0}, {32});
  Pools to({0}, {32}, false);
  const std::vector<int32_t> tokens = Tokens(2 * kLength + 1);
  from.RunAndFree(1, tokens);
  CHECK(to.manager.ImportBlocks(tokens, 0, ViewsOf(from.manager.ExportBlocks(tokens, 0, 9))) == 0);
  to.manager.CheckIntegrity();
}

}  // namespace
}  // namespace turbomind
