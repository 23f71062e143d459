#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "turbomind/kv/pool_sizes.h"

#include <doctest/doctest.h>

#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

KvCacheConfig Config(std::vector<int> windows, KvCacheMode mode = KvCacheMode::kFp4Nv) {
  return MakeKvCacheConfig(windows, mode, 2, 32, 16, DataType::kBFloat16);
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

}  // namespace
}  // namespace turbomind
