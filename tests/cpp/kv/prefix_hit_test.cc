#include "turbomind/kv/prefix_hit.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kv/first_seen.h"

namespace turbomind {
namespace {

constexpr int kLength = 16;

std::vector<LayerGroup> Groups(std::vector<int> windows, PrecisionWindowTokens window16) {
  KvCacheConfig config =
      MakeKvCacheConfig(windows, KvCacheMode::kFp4Nv, 1, 16, kLength, DataType::kBFloat16);
  config.window16 = window16;
  return MakeLayerGroups(config);
}

bool Has(const std::vector<std::vector<int>>& path, int64_t block, size_t pool) {
  return path[static_cast<size_t>(block)][pool] >= 0;
}

// Applies the definition block by block to the query after n blocks. With `any_pool`, a 16-bit copy
// and a quantized copy are equally good.
bool IsUsable(const std::vector<LayerGroup>& groups, const std::vector<std::vector<int>>& path,
              int64_t n, bool any_pool) {
  const int64_t position = n * kLength;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t oldest = FirstSeen(groups[g].window, position);
    for (int64_t b = oldest / kLength; b < n; ++b) {
      const PrecisionWindow& rule = groups[g].rule;
      const bool quantized = Has(path, b, g);
      const bool window16 = rule.enabled() && Has(path, b, groups.size() + g);
      const bool seen_window16 = rule.enabled() && rule.IsInWindow16(b, position);
      const bool just_left = rule.enabled() && !seen_window16 && rule.IsInWindow16(b, position - 1);
      const bool usable = seen_window16 ? window16 : quantized || (just_left && window16);
      if (!(any_pool ? quantized || window16 : usable)) {
        return false;
      }
    }
  }
  return true;
}

int64_t Longest(const std::vector<LayerGroup>& groups, const std::vector<std::vector<int>>& path,
                bool any_pool) {
  auto n = static_cast<int64_t>(path.size());
  while (n > 0 && !IsUsable(groups, path, n, any_pool)) {
    --n;
  }
  return n;
}

TEST_CASE("with recurrent layers a hit ends at a checkpoint") {
  const std::vector<LayerGroup> groups = Groups({0}, {});
  const std::vector<std::vector<int>> path = {{1, -1, 4}, {2, -1, -1}, {3, -1, 5}, {4, -1, -1}};
  const PrefixHit hit = FindPrefixHit(groups, path, 2);
  CHECK(hit.num_blocks == 3);
  CHECK(hit.num_found == 4);
  CHECK(FindPrefixHit(groups, path).num_blocks == 4);
  CHECK(FindPrefixHit(groups, {{1, -1, -1}}, 2).num_blocks == 0);
}

TEST_CASE("FindPrefixHit returns the longest usable prefix for any missing blocks") {
  std::mt19937 random(1);
  int64_t num_partial = 0;
  int64_t num_cut = 0;
  for (const PrecisionWindowTokens& window16 :
       {PrecisionWindowTokens{}, {0, 0}, {64, 0}, {0, 64}, {64, 64}, {128, 192}}) {
    for (const std::vector<int>& windows :
         {std::vector<int>{0}, {0, 40}, {66}, {0, 20, 150}, {0, -72}}) {
      const std::vector<LayerGroup> groups = Groups(windows, window16);
      const size_t num_pools = groups.size() * (groups.front().rule.enabled() ? 2 : 1);
      for (int round = 0; round < 300; ++round) {
        const unsigned missing = 1 + random() % 20;  // percent
        std::vector<std::vector<int>> path(random() % 24, std::vector<int>(num_pools, 1));
        for (std::vector<int>& blocks : path) {
          for (int& block : blocks) {
            block = random() % 100 < missing ? -1 : 1;
          }
        }
        const PrefixHit hit = FindPrefixHit(groups, path);
        REQUIRE(hit.num_blocks == Longest(groups, path, false));
        REQUIRE(hit.num_found == Longest(groups, path, true));
        num_partial += hit.num_blocks > 0 && hit.num_blocks < static_cast<int64_t>(path.size());
        num_cut += hit.num_found > hit.num_blocks;
        REQUIRE((window16.recent_tokens >= 0 || hit.num_found == hit.num_blocks));
      }
    }
  }
  CHECK(num_partial > 1000);
  CHECK(num_cut > 500);
}

}  // namespace
}  // namespace turbomind
