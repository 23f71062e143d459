#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "turbomind/kv/layer_group.h"

#include <doctest/doctest.h>

#include <vector>

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

}  // namespace
}  // namespace turbomind
