#include "turbomind/kv/layer_group.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "kv/first_seen.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

KvCacheConfig Config(std::vector<int> windows, KvCacheMode format = KvCacheMode::kFp4Nv) {
  return MakeKvCacheConfig(windows, format, 2, 32, 16, DataType::kBFloat16);
}

TEST_CASE("layers are grouped by their sliding window") {
  const std::vector<LayerGroup> groups = MakeLayerGroups(Config({40, 0, 40, 8, 0}));
  REQUIRE(groups.size() == 3);
  CHECK(groups[0].window == 0);
  CHECK(groups[0].layers == std::vector<int>{1, 4});
  CHECK(groups[1].window == 8);
  CHECK(groups[1].layers == std::vector<int>{3});
  CHECK(groups[2].window == 40);
  CHECK(groups[2].layers == std::vector<int>{0, 2});
  CHECK(groups[2].bytes_per_block() == 2 * groups[1].bytes_per_block());
  CHECK_THROWS_AS(MakeLayerGroups(Config({})), InvalidArgument);
}

TEST_CASE("layers without attention are in no group, and one layer needs attention") {
  const std::vector<LayerGroup> groups =
      MakeLayerGroups(Config({kNoAttention, 0, kNoAttention, 8, 0}));
  REQUIRE(groups.size() == 2);
  CHECK(groups[0].layers == std::vector<int>{1, 4});
  CHECK(groups[1].layers == std::vector<int>{3});
  CHECK_THROWS_AS(MakeLayerGroups(Config({kNoAttention, kNoAttention})), InvalidArgument);
}

TEST_CASE(
    "layers with other heads form groups, and layers without K and V of their own form none") {
  KvCacheConfig config = Config({40, 0, 40, 40, 0, 0});
  config.layer_head_dims = {32, 64, 32, 32, 64, 64};
  config.layer_kv_heads = {2, 1, 2, 2, 1, 2};
  config.kv_sources = {0, 1, 2, 2, 1, 5};
  const std::vector<LayerGroup> groups = MakeLayerGroups(config);
  REQUIRE(groups.size() == 3);
  CHECK(groups[0].layers == std::vector<int>{1});
  CHECK(groups[0].num_readers == 2);
  CHECK(groups[0].layout.config().head_dim == 64);
  CHECK(groups[0].layout.config().kv_heads == 1);
  CHECK(groups[1].layers == std::vector<int>{5});
  CHECK(groups[1].num_readers == 1);
  CHECK(groups[1].bytes_per_block() == 2 * groups[0].bytes_per_block());
  CHECK(groups[2].layers == std::vector<int>{0, 2});
  CHECK(groups[2].num_readers == 3);
}

TEST_CASE("layers with chunks follow those with full attention and with windows") {
  const std::vector<LayerGroup> groups = MakeLayerGroups(Config({-40, 0, 40, -8, -40}));
  REQUIRE(groups.size() == 4);
  CHECK(groups[0].window == 0);
  CHECK(groups[1].window == 40);
  CHECK(groups[2].window == -40);
  CHECK(groups[2].layers == std::vector<int>{0, 4});
  CHECK(groups[3].window == -8);
}

TEST_CASE("K offsets are in the pools whose keys are known, or have a bias, when quantized") {
  const auto has_offset = [](const block::Layout& layout) {
    return layout.LayerView(0, nullptr, nullptr).HasKOffset();
  };
  for (const bool windowed : {false, true}) {
    for (const bool k_offset : {false, true}) {
      for (const bool k_bias : {false, true}) {
        KvCacheConfig config = Config({0});
        config.window16 = windowed ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
        config.window_format = KvCacheMode::kInt8;
        config.k_offset = k_offset;
        config.k_bias = k_bias;
        const LayerGroup group = MakeLayerGroups(config).front();
        CHECK(has_offset(group.layout) == (k_offset && (windowed || k_bias)));
        if (windowed) {
          CHECK(has_offset(*group.window16_layout) == (k_offset && k_bias));
        }
      }
    }
  }
}

TEST_CASE("the window of layers with 16-bit keys is in 16 bits, that of others in its format") {
  KvCacheConfig config = Config({0, 0});
  config.layers[0] = {KvCacheMode::kNone, KvCacheMode::kFp4Nv};
  config.window16 = {64, 64};
  config.window_format = KvCacheMode::kInt8;
  const LayerGroup group = MakeLayerGroups(config).front();
  const KvLayerView first = group.window16_layout->LayerView(0, nullptr, nullptr);
  const KvLayerView second = group.window16_layout->LayerView(1, nullptr, nullptr);
  for (const int side : {0, 1}) {
    CHECK(first.format[side] == KvCacheMode::kNone);
    CHECK(second.format[side] == KvCacheMode::kInt8);
  }
}

TEST_CASE("layers in 16 bit have no 16-bit blocks and are grouped apart from the others") {
  KvCacheConfig config = Config({40, 0, 40, 0});
  config.layers[0] = config.layers[1] = {};
  config.layers[2] = {KvCacheMode::kNone, KvCacheMode::kFp4Nv};
  CHECK(MakeLayerGroups(config).size() == 2);
  CHECK_FALSE(HasWindow16(MakeLayerGroups(config)));
  config.window16 = {64, 64};
  const std::vector<LayerGroup> groups = MakeLayerGroups(config);
  CHECK(HasWindow16(groups));
  REQUIRE(groups.size() == 4);
  const std::vector<int> layers[] = {{3}, {1}, {2}, {0}};
  for (size_t g = 0; g < 4; ++g) {
    const bool is_sixteen_bit = g % 2 == 1;
    CHECK(groups[g].window == (g < 2 ? 0 : 40));
    CHECK(groups[g].layers == layers[g]);
    CHECK(groups[g].rule.enabled() == !is_sixteen_bit);
    CHECK(groups[g].window16_layout.has_value() == !is_sixteen_bit);
    CHECK((groups[g].Window16BlocksPerSequence(1000, 64) == 0) == is_sixteen_bit);
  }
  config.layers.assign(4, {});
  CHECK_FALSE(HasWindow16(MakeLayerGroups(config)));
}

TEST_CASE("the first visible block holds the oldest position in the sliding window") {
  const std::vector<LayerGroup> groups = MakeLayerGroups(Config({0, 40, -40}));
  for (int64_t position = 0; position < 300; ++position) {
    CHECK(groups[0].FirstVisibleBlock(position) == 0);
    const int64_t oldest = position - 40 + 1 > 0 ? position - 40 + 1 : 0;  // in (p − window, p]
    CHECK(groups[1].FirstVisibleBlock(position) == oldest / 16);
    CHECK(groups[2].FirstVisibleBlock(position) == position / 40 * 40 / 16);
  }
  CHECK(groups[0].BlocksPerSequence(100, 8) == 7);
  CHECK(groups[1].BlocksPerSequence(1000, 1) == 3 + 2 + 1);
  CHECK(groups[1].BlocksPerSequence(20, 1) == 2);
  // The blocks that a sequence holds never exceed this number in any step.
  for (const int64_t chunk : {1, 7, 16, 33, 100}) {
    for (int64_t position = 0; position < 400; position += chunk) {
      for (const size_t g : {size_t{1}, size_t{2}}) {
        const int64_t held = (position + chunk + 15) / 16 - groups[g].FirstVisibleBlock(position);
        CHECK(held <= groups[g].BlocksPerSequence(500, chunk));
      }
    }
  }
}

LayerGroup Window16Group(PrecisionWindowTokens window16, int window, int block_seq_len) {
  KvCacheConfig config =
      MakeKvCacheConfig({window}, KvCacheMode::kFp4Nv, 2, 32, block_seq_len, DataType::kBFloat16);
  config.window16 = window16;
  return MakeLayerGroups(config).front();
}

// Returns the blocks that queries in [begin, end) read quantized, from the rule alone.
std::set<int64_t> SeenQuantized(const LayerGroup& group, int64_t begin, int64_t end) {
  const int64_t length = group.rule.block_seq_len;
  std::set<int64_t> blocks;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t oldest = FirstSeen(group.window, p);
    for (int64_t b = oldest / length; b <= p / length; ++b) {
      if (!group.rule.IsInWindow16(b, p)) {
        blocks.insert(b);
      }
    }
  }
  return blocks;
}

// Returns the blocks that a query at `position` reads in 16 bits.
std::set<int64_t> SeenWindow16(const LayerGroup& group, int64_t position) {
  const int64_t length = group.rule.block_seq_len;
  std::set<int64_t> blocks;
  for (int64_t b = group.FirstVisibleBlock(position); b <= position / length; ++b) {
    if (group.rule.IsInWindow16(b, position)) {
      blocks.insert(b);
    }
  }
  return blocks;
}

struct Peak {
  int64_t quantized = 0;
  int64_t window16 = 0;
};

// Returns the largest number of blocks that a sequence of `total` tokens holds in each pool, over
// steps of `chunk` tokens that begin at any position.
Peak PeakOf(const LayerGroup& group, int64_t total, int64_t chunk) {
  const int64_t length = group.rule.block_seq_len;
  Peak peak;
  for (int64_t n = 0; n < total; ++n) {
    const int64_t m = std::min(n + chunk, total);
    const int64_t first = group.FirstVisibleBlock(n);
    std::set<int64_t> quantized = SeenQuantized(group, std::max<int64_t>(n - 1, 0), m);
    quantized.erase(quantized.begin(), quantized.lower_bound(first));
    std::set<int64_t> window16 = n > 0 ? SeenWindow16(group, n - 1) : std::set<int64_t>();
    window16.erase(window16.begin(), window16.lower_bound(first));
    for (int64_t b = n / length; b * length < m; ++b) {
      window16.insert(b);
    }
    peak.quantized = std::max(peak.quantized, static_cast<int64_t>(quantized.size()));
    peak.window16 = std::max(peak.window16, static_cast<int64_t>(window16.size()));
  }
  return peak;
}

constexpr PrecisionWindowTokens kWindow16Tokens[] = {{0, 0},   {64, 0},   {0, 64},
                                                     {64, 64}, {128, 64}, {64, 192}};

TEST_CASE("QuantizedBlocks returns the blocks that the rule makes a step read quantized") {
  for (const int length : {16, 32, 64, 128}) {
    for (const PrecisionWindowTokens& tokens : kWindow16Tokens) {
      for (const int window : {0, 1, 17, 64, 65, 66, 129, 130, 200, -64, -150, -256}) {
        const LayerGroup group = Window16Group(tokens, window, length);
        for (int64_t begin = 0; begin < 600; begin += 37) {
          for (const int64_t chunk : {0, 1, 64, 150}) {
            const BlockRange range = group.QuantizedBlocks(begin, begin + chunk);
            std::set<int64_t> blocks;
            for (int64_t b = range.begin; b < range.end; ++b) {
              blocks.insert(b);
            }
            const std::set<int64_t> seen = SeenQuantized(group, begin, begin + chunk);
            if (window < 0) {  // the last queries may be in a later chunk
              CHECK(std::ranges::includes(blocks, seen));
            } else {
              CHECK(blocks == seen);
            }
            CHECK((!group.rule.IsAlwaysInWindow16(group.window) || blocks.empty()));
          }
        }
      }
    }
  }
}

TEST_CASE("block bounds hold for every sequence and are reached by long ones") {
  for (const int length : {16, 64}) {
    for (const PrecisionWindowTokens& tokens : kWindow16Tokens) {
      for (const int window : {0, 40, 65, 66, 200, -64, -150}) {
        const LayerGroup group = Window16Group(tokens, window, length);
        for (const int64_t chunk : {1, 16, 17, 100, 1000}) {
          for (const int64_t total : {1, 64, 65, 300, 641}) {
            const Peak peak = PeakOf(group, total, chunk);
            CHECK(peak.quantized <= group.BlocksPerSequence(total, chunk));
            CHECK(peak.window16 <= group.Window16BlocksPerSequence(total, chunk));
            if (total == 641 && chunk <= 17 && window >= 0) {
              CHECK(peak.quantized == group.BlocksPerSequence(total, chunk));
            }
            if (total == 641 && chunk <= 17 && window == 0) {
              CHECK(peak.window16 == group.Window16BlocksPerSequence(total, chunk));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("blocks held between steps follow from the rule") {
  for (const int length : {16, 32, 64, 128}) {
    for (const PrecisionWindowTokens& tokens : kWindow16Tokens) {
      for (const int window : {0, 40, 66, 200, -48, -200}) {
        const LayerGroup group = Window16Group(tokens, window, length);
        for (int64_t n = 1; n < 700; n += 9) {
          std::set<int64_t> window16 = SeenWindow16(group, n - 1);
          window16.erase(window16.begin(), window16.lower_bound(group.FirstVisibleBlock(n)));
          CHECK(group.Window16BlocksHeld(n) == static_cast<int64_t>(window16.size()));
          CHECK(group.QuantizedBlocksHeld(n) + group.Window16BlocksHeld(n) ==
                (n + length - 1) / length - group.FirstVisibleBlock(n));
        }
      }
    }
  }
}

TEST_CASE("block counts match worked examples") {
  const LayerGroup full = Window16Group({64, 64}, 0, 64);
  CHECK(full.QuantizedBlocksHeld(8192) == 125);
  CHECK(full.Window16BlocksHeld(8192) == 3);
  CHECK(full.BlocksPerSequence(8192, 1) == 125);
  CHECK(full.BlocksPerSequence(8192, 4096) == 125);
  CHECK(full.Window16BlocksPerSequence(8192, 1) == 4);
  CHECK(full.Window16BlocksPerSequence(8192, 4096) == 3 + 64);
  CHECK(full.BlocksPerSequence(192, 192) == 0);
  CHECK(full.Window16BlocksPerSequence(192, 192) == 3);
  CHECK(full.BlocksPerSequence(193, 1) == 1);
  const LayerGroup sliding = Window16Group({64, 64}, 128, 64);  // as in GPT-OSS
  CHECK(sliding.BlocksPerSequence(8192, 1) == 1);
  CHECK(sliding.Window16BlocksPerSequence(8192, 1) ==
        3);  // at most the blocks of the sliding window
  CHECK(sliding.Window16BlocksHeld(8192) == 2);
  CHECK(sliding.QuantizedBlocksHeld(8192) == 0);
  CHECK(sliding.QuantizedBlocksHeld(8129) == 1);
  CHECK(Window16Group({64, 128}, 128, 64).BlocksPerSequence(8192, 8192) == 0);
  const LayerGroup raw = Window16Group({}, 0, 64);
  CHECK(raw.Window16BlocksPerSequence(8192, 4096) == 0);
  CHECK(raw.Window16BlocksHeld(8192) == 0);
  CHECK(raw.QuantizedBlocksHeld(8192) == 128);
  // Huge numbers do not overflow.
  constexpr int64_t kHuge = int64_t{1} << 62;
  CHECK(full.BlocksPerSequence(kHuge, kHuge) == kHuge / 64 - 3);
  CHECK(full.Window16BlocksPerSequence(kHuge, kHuge) == kHuge / 64);
  CHECK(sliding.BlocksPerSequence(kHuge, kHuge) > 0);
}

}  // namespace
}  // namespace turbomind
