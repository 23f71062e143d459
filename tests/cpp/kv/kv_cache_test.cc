#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "turbomind/kv/kv_cache.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kv/memory_device.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

KvCacheConfig Config(std::vector<int> windows, KvCacheMode mode = KvCacheMode::kFp4Nv) {
  return MakeKvCacheConfig(windows, mode, 2, 32, 16, DataType::kBFloat16);
}

TEST_CASE("layers are grouped by what they keep") {
  const std::vector<LayerGroup> groups = MakeLayerGroups(Config({40, 0, 40, 8, 0}));
  REQUIRE(groups.size() == 3);
  CHECK(groups[0].window == 0);
  CHECK(groups[0].layers == std::vector<int>{1, 4});
  CHECK(groups[1].window == 8);
  CHECK(groups[1].layers == std::vector<int>{3});
  CHECK(groups[2].window == 40);
  CHECK(groups[2].layers == std::vector<int>{0, 2});
  CHECK(groups[2].bytes_per_block() == 2 * groups[1].bytes_per_block());
  CHECK_THROWS_AS(MakeLayerGroups(Config({0, -1})), InvalidArgument);
  CHECK_THROWS_AS(MakeLayerGroups(Config({})), InvalidArgument);
}

TEST_CASE("the first visible block is that of the oldest position in the window") {
  const std::vector<LayerGroup> groups = MakeLayerGroups(Config({0, 40}));
  for (int64_t position = 0; position < 300; ++position) {
    CHECK(groups[0].FirstVisibleBlock(position) == 0);
    const int64_t oldest = position - 40 + 1 > 0 ? position - 40 + 1 : 0;  // in (p − window, p]
    CHECK(groups[1].FirstVisibleBlock(position) == oldest / 16);
  }
  CHECK(groups[0].BlocksPerSequence(100, 8) == 7);
  CHECK(groups[1].BlocksPerSequence(1000, 1) == 3 + 2 + 1);
  CHECK(groups[1].BlocksPerSequence(20, 1) == 2);
  // What a sequence really holds, step by step, never exceeds it.
  for (const int64_t chunk : {1, 7, 16, 33, 100}) {
    for (int64_t position = 0; position < 400; position += chunk) {
      const int64_t held = (position + chunk + 15) / 16 - groups[1].FirstVisibleBlock(position);
      CHECK(held <= groups[1].BlocksPerSequence(500, chunk));
    }
  }
}

TEST_CASE("one group: blocks are the budget over data and scales together") {
  const std::vector<LayerGroup> groups = MakeLayerGroups(Config({0, 0, 0}));
  const KvDemand demand = {1024, 256, 0};
  const int64_t each = groups[0].bytes_per_block();
  CHECK(each == 3 * 16 * 2 * 2 * (16 + 2));
  for (const int64_t budget : {int64_t{0}, each - 1, each, 10 * each - 1, 10 * each + 3}) {
    CHECK(BlocksForBudget(groups, budget, demand) == std::vector<int64_t>{budget / each});
  }
  CHECK(BlocksForBudget(groups, -5, demand) == std::vector<int64_t>{0});
  CHECK(BlocksForBudget(groups, int64_t{1} << 50, {1024, 256, 4}) == std::vector<int64_t>{4 * 64});
  CHECK(BlocksForCount(groups, 77, demand) == std::vector<int64_t>{77});
}

TEST_CASE("several groups: the budget serves the same number of sequences in each") {
  const std::vector<LayerGroup> groups = MakeLayerGroups(Config({0, 40, 40, 40}));
  const KvDemand demand = {4096, 64, 0};
  const int64_t budget = 100 << 20;
  const std::vector<int64_t> blocks = BlocksForBudget(groups, budget, demand);
  const int64_t bytes =
      blocks[0] * groups[0].bytes_per_block() + blocks[1] * groups[1].bytes_per_block();
  CHECK(bytes <= budget);
  CHECK(bytes > budget - groups[0].bytes_per_block() - groups[1].bytes_per_block());
  const double sequences[] = {
      static_cast<double>(blocks[0]) / static_cast<double>(groups[0].BlocksPerSequence(4096, 64)),
      static_cast<double>(blocks[1]) / static_cast<double>(groups[1].BlocksPerSequence(4096, 64))};
  CHECK(sequences[0] == doctest::Approx(sequences[1]).epsilon(0.01));
  CHECK(BlocksForCount(groups, 512, demand) == std::vector<int64_t>{512, 18});
  CHECK_THROWS_AS(BlocksForBudget(groups, budget, {0, 1, 1}), InvalidArgument);
  CHECK_THROWS_AS(BlocksForBudget(groups, budget, {1, -1, 1}), InvalidArgument);
  CHECK_THROWS_AS(BlocksForCount(groups, 1, {1, 1, -1}), InvalidArgument);
}

TEST_CASE("pools: addresses, sizes, copies, release") {
  MemoryDevice device;
  {
    KvCache cache(device, Config({40, 0, 40}), {3, 5});
    CHECK(cache.GroupOf(0) == 1);
    CHECK(cache.GroupOf(1) == 0);
    CHECK(cache.reserved_bytes() == static_cast<int64_t>(device.reserved_bytes));
    CHECK(cache.data_bytes(1) == 5 * cache.groups()[1].layout.block_bytes());
    CHECK(cache.LayerView(0).Payload(KvSide::kK, 4, 0) == cache.GetBlockPtr(1, 4));
    CHECK(cache.LayerView(0).Scales(KvSide::kK, 4, 0) == cache.GetScaleBlockPtr(1, 4));
    CHECK(cache.LayerView(2).data - cache.LayerView(0).data ==
          cache.groups()[1].layout.block_bytes() / 2);
    CHECK(cache.LayerView(2).g[0] == nullptr);

    const auto data_bytes = static_cast<size_t>(cache.groups()[1].layout.block_bytes());
    const auto scale_bytes = static_cast<size_t>(cache.groups()[1].layout.scale_block_bytes());
    std::memset(cache.GetBlockPtr(1, 2), 1, data_bytes);
    std::memset(cache.GetScaleBlockPtr(1, 2), 2, scale_bytes);
    cache.CopyBlock(1, 3, 2);
    CHECK(std::memcmp(cache.GetBlockPtr(1, 3), cache.GetBlockPtr(1, 2), data_bytes) == 0);
    CHECK(std::memcmp(cache.GetScaleBlockPtr(1, 3), cache.GetScaleBlockPtr(1, 2), scale_bytes) ==
          0);
    CHECK(static_cast<unsigned char>(*cache.GetBlockPtr(1, 4)) == MemoryDevice::kSentinel);
    CHECK(static_cast<unsigned char>(*cache.GetScaleBlockPtr(1, 4)) == MemoryDevice::kSentinel);

    CHECK_THROWS_AS(cache.GetBlockPtr(1, 5), InternalError);
    CHECK_THROWS_AS(cache.GetBlockPtr(0, -1), InternalError);
    CHECK_THROWS_AS(cache.CopyBlock(2, 0, 0), InternalError);
  }
  CHECK(device.reserved_bytes == 0);
}

TEST_CASE("no scale pool without FP4; a failing reservation gives everything back") {
  MemoryDevice device;
  KvCache cache(device, Config({0}, KvCacheMode::kInt8), {4});
  CHECK(cache.scale_bytes(0) == 0);
  CHECK(cache.GetScaleBlockPtr(0, 0) == nullptr);
  CHECK(cache.LayerView(0).scales == nullptr);
  CHECK_NOTHROW(cache.CheckScaleBytes(0, 0));

  MemoryDevice small;
  small.limit_bytes = static_cast<size_t>(4 * cache.groups()[0].layout.block_bytes());
  CHECK_THROWS_AS(KvCache(small, Config({0, 8}, KvCacheMode::kInt8), {4, 4}), std::bad_alloc);
  CHECK(small.reserved_bytes == 0);
  CHECK_THROWS_AS(KvCache(device, Config({0}), {0}), InvalidArgument);
  CHECK_THROWS_AS(KvCache(device, Config({0}), {int64_t{1} << 31}), InvalidArgument);
}

TEST_CASE("factors are checked and seen by kernels") {
  MemoryDevice device;
  KvCache cache(device, Config({0, 0}), {2});
  cache.SetFactors(1, KvSide::kV, {0.5f, 2.f});
  CHECK(cache.LayerView(1).g[1][1] == 2.f);
  CHECK(cache.LayerView(1).g[0] == nullptr);
  CHECK(cache.LayerView(0).g[1] == nullptr);
  cache.SetFactors(1, KvSide::kV, {1.f, 4.f});
  CHECK(cache.LayerView(1).g[1][1] == 4.f);
  for (const float bad : {0.f, -1.f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    CHECK_THROWS_AS(cache.SetFactors(0, KvSide::kK, {1.f, bad}), InvalidArgument);
  }
  CHECK_THROWS_AS(cache.SetFactors(0, KvSide::kK, {1.f}), InvalidArgument);
  CHECK_THROWS_AS(cache.SetFactors(2, KvSide::kK, {1.f, 1.f}), InvalidArgument);
}

TEST_CASE("scale bytes that no encoder stores are found wherever they lie") {
  struct Case {
    KvCacheMode mode;
    int good;
    std::vector<int> bad;
  };
  for (const Case& one : {Case{KvCacheMode::kFp4Nv, 0x7E, {0x7F, 0x80, 0xFF}},
                          Case{KvCacheMode::kFp4Mx, 112, {0, 111, 137, 255}}}) {
    MemoryDevice device;
    KvCache cache(device, Config({0, 0}, one.mode), {2});
    const auto num_bytes = static_cast<size_t>(cache.groups()[0].layout.scale_block_bytes());
    std::byte* scales = cache.GetScaleBlockPtr(0, 1);
    CHECK_THROWS_AS(cache.CheckScaleBytes(0, 1), InternalError);  // the sentinel
    std::memset(scales, one.good, num_bytes);
    CHECK_NOTHROW(cache.CheckScaleBytes(0, 1));
    for (const int bad : one.bad) {
      for (size_t i = 0; i < num_bytes; ++i) {
        scales[i] = static_cast<std::byte>(bad);
        CHECK_THROWS_AS(cache.CheckScaleBytes(0, 1), InternalError);
        scales[i] = static_cast<std::byte>(one.good);
      }
    }
  }
}

}  // namespace
}  // namespace turbomind
