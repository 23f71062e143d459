#include "turbomind/kv/pool_budget.h"

#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

KvCacheConfig Config(std::vector<int> windows, KvCacheMode format = KvCacheMode::kFp4Nv) {
  return MakeKvCacheConfig(windows, format, 2, 32, 16, DataType::kBFloat16);
}

TEST_CASE("with one group, the budget divides into blocks of data plus scales") {
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

TEST_CASE("with several groups, the budget serves the same number of sequences in each") {
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

std::vector<LayerGroup> Window16Groups(std::vector<int> windows,
                                       PrecisionWindowTokens window16 = {64, 64}) {
  KvCacheConfig config =
      MakeKvCacheConfig(windows, KvCacheMode::kFp4Nv, 2, 64, 64, DataType::kBFloat16);
  config.window16 = window16;
  return MakeLayerGroups(config);
}

int64_t Bytes(const std::vector<LayerGroup>& groups, const std::vector<int64_t>& blocks) {
  int64_t bytes = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    bytes += blocks[g] * groups[g].bytes_per_block() +
             blocks[groups.size() + g] * groups[g].window16_bytes_per_block();
  }
  return bytes;
}

TEST_CASE("BlocksForSequences counts quantized and 16-bit blocks") {
  const std::vector<LayerGroup> groups = Window16Groups({0});
  // Each sequence has 64 blocks, 61 of them quantized. Its 16-bit blocks are sinks, recent, current
  // and pending quantization. The blocks of a step's 512 tokens are counted once.
  const KvDemand demand = {.session_len = 4096, .chunk = 512};
  CHECK(BlocksForSequences(groups, 0, demand) == std::vector<int64_t>{0, 0});
  CHECK(BlocksForSequences(groups, 1, demand) == std::vector<int64_t>{61, 4 + 7});
  CHECK(BlocksForSequences(groups, 10, demand) == std::vector<int64_t>{610, 40 + 7});
  // Short sequences stay in the 16-bit window for any chunk size.
  const KvDemand brief = {.session_len = 128, .chunk = 8192};
  CHECK(BlocksForSequences(groups, 10, brief) == std::vector<int64_t>{10, 20});
  // A sequence of five blocks may hold one 16-bit block more than decode keeps. The chunk limits
  // the sum of these extra blocks.
  const KvDemand five = {.session_len = 320, .chunk = 512};
  CHECK(BlocksForSequences(groups, 3, five) == std::vector<int64_t>{6, 15});
  CHECK(BlocksForSequences(groups, 9, five) == std::vector<int64_t>{18, 9 * 4 + 7});
}

TEST_CASE("with 16-bit pools, the budget holds the same number of sequences in every pool") {
  const std::vector<LayerGroup> groups = Window16Groups({0, 128, 128});
  const int64_t quantized = groups[0].bytes_per_block();
  const int64_t window16 = groups[0].window16_bytes_per_block();
  CHECK(quantized == 2 * 2 * 64 * 36);
  CHECK(window16 == 2 * 2 * 64 * 128);
  const KvDemand demand = {.session_len = 4096, .chunk = 512};
  for (const int64_t n : {1, 2, 7, 100}) {
    const std::vector<int64_t> needed = BlocksForSequences(groups, n, demand);
    const int64_t budget = Bytes(groups, needed);
    CHECK(BlocksForBudget(groups, budget, demand) == needed);
    const std::vector<int64_t> less = BlocksForBudget(groups, budget - 1, demand);
    const std::vector<int64_t> more =
        BlocksForBudget(groups, budget + 9 * (quantized + window16), demand);
    CHECK(Bytes(groups, more) <= budget + 9 * (quantized + window16));
    for (size_t pool = 0; pool < needed.size(); ++pool) {
      CHECK(less[pool] <= needed[pool]);
      CHECK(more[pool] >= needed[pool]);
    }
  }
  CHECK(BlocksForBudget(groups, 0, demand) == std::vector<int64_t>(4, 0));
  CHECK(BlocksForBudget(groups, -1, demand) == std::vector<int64_t>(4, 0));
}

TEST_CASE("16-bit pools take up to a quarter of the budget for many short sequences") {
  const std::vector<LayerGroup> groups = Window16Groups({0});
  const int64_t quantized = groups[0].bytes_per_block();
  const int64_t window16 = groups[0].window16_bytes_per_block();
  KvDemand demand = {.session_len = 65536, .chunk = 64};
  const std::vector<int64_t> one = {1021, 4};
  const int64_t budget = 4 * (one[0] * quantized + one[1] * window16);
  CHECK(BlocksForBudget(groups, budget, demand) == std::vector<int64_t>{4 * 1021, 16});
  demand.num_running = 32;  // 128 blocks are less than a quarter
  CHECK(BlocksForBudget(groups, budget, demand) ==
        std::vector<int64_t>{(budget - 128 * window16) / quantized, 128});
  demand.num_running = 1000;
  const int64_t quarter = budget / 4 / window16;
  CHECK(quarter < 4000);
  CHECK(BlocksForBudget(groups, budget, demand) ==
        std::vector<int64_t>{(budget - quarter * window16) / quantized, quarter});
  // A sequence of session_len still fits.
  const int64_t tight = one[0] * quantized + 10 * window16;
  CHECK(BlocksForBudget(groups, tight, demand) == std::vector<int64_t>{1021, 10});
  // The pools never exceed what max_sequences need.
  demand.num_running = demand.max_sequences = 2;
  CHECK(BlocksForBudget(groups, int64_t{1} << 50, demand) == std::vector<int64_t>{2042, 8});
}

TEST_CASE("16-bit pools are added to a given number of quantized blocks") {
  const std::vector<LayerGroup> groups = Window16Groups({0});
  KvDemand demand = {.session_len = 4096, .chunk = 8192};
  // 61 quantized blocks hold one sequence of 4096 tokens, which may be written in one step.
  CHECK(BlocksForCount(groups, 61, demand) == std::vector<int64_t>{61, 64});
  // A shorter sequence has 13 blocks, 10 of them quantized.
  CHECK(BlocksForCount(groups, 10, demand) == std::vector<int64_t>{10, 13});
  CHECK(BlocksForCount(groups, 1, demand) == std::vector<int64_t>{1, 4});
  CHECK(BlocksForCount(groups, 610, demand) == std::vector<int64_t>{610, 40 + 127});
  demand.num_running = 50;
  CHECK(BlocksForCount(groups, 610, demand) == std::vector<int64_t>{610, 200 + 127});
  CHECK(BlocksForCount(groups, 10, demand) == std::vector<int64_t>{10, 13});
  demand.max_sequences = 1;
  CHECK(BlocksForCount(groups, 610, demand) == std::vector<int64_t>{61, 64});
  CHECK(BlocksForCount(groups, 0, demand)[0] == 0);
  // A quantized pool that is never used still gets one block.
  const std::vector<int64_t> blocks =
      BlocksForCount(Window16Groups({0, 65}), 5, {.session_len = 4096, .chunk = 64});
  CHECK(blocks == std::vector<int64_t>{5, 1, 4, 3});
}

TEST_CASE("huge numbers saturate") {
  const std::vector<LayerGroup> groups = Window16Groups({0, 4096});
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const KvDemand demand = {
      .session_len = kHuge / 2, .chunk = kHuge / 2, .max_sequences = 0, .num_running = kHuge};
  for (const int64_t number : {int64_t{0}, int64_t{1}, int64_t{1} << 40, kHuge}) {
    for (const auto& blocks :
         {BlocksForBudget(groups, number, demand), BlocksForCount(groups, number, demand),
          BlocksForBudget(groups, number, {1, 1, kHuge, kHuge}),
          BlocksForCount(groups, number, {1, 1, kHuge, kHuge})}) {
      REQUIRE(blocks.size() == 4);
      for (const int64_t n : blocks) {
        CHECK(n >= 0);
        CHECK(n <= std::numeric_limits<int32_t>::max());
      }
    }
  }
}

}  // namespace
}  // namespace turbomind
