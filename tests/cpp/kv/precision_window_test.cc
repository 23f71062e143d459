#include "turbomind/kv/precision_window.h"

#include <doctest/doctest.h>

#include <string>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

TEST_CASE("window sizes in tokens are rounded up to whole blocks") {
  const struct {
    PrecisionWindowTokens tokens;
    int block_seq_len;
    int sink_blocks;
    int recent_blocks;
  } cases[] = {{{64, 64}, 16, 4, 4}, {{64, 64}, 64, 1, 1},    {{64, 64}, 128, 1, 1},
               {{128, 0}, 32, 4, 0}, {{0, 4096}, 16, 0, 256}, {{192, 192}, 128, 2, 2}};
  for (const auto& one : cases) {
    const PrecisionWindow rule = MakePrecisionWindow(one.tokens, one.block_seq_len);
    CHECK(rule.enabled());
    CHECK(rule.block_seq_len == one.block_seq_len);
    CHECK(rule.sink_blocks == one.sink_blocks);
    CHECK(rule.recent_blocks == one.recent_blocks);
  }
  CHECK_FALSE(MakePrecisionWindow({}, 64).enabled());
  CHECK(MakePrecisionWindow({}, 64).sink_blocks == 0);
}

TEST_CASE("numbers that are not multiples of 64 in [0, 4096] are rejected with the flag") {
  for (const PrecisionWindowTokens& bad : {PrecisionWindowTokens{1, 64},
                                           {64, 63},
                                           {-64, 64},
                                           {64, -64},
                                           {64, -1},
                                           {4160, 64},
                                           {0, 4160},
                                           {0, -2}}) {
    CHECK_THROWS_AS(MakePrecisionWindow(bad, 64), InvalidArgument);
  }
  try {
    MakePrecisionWindow({0, 100}, 64);
    FAIL("100 was accepted");
  } catch (const InvalidArgument& error) {
    const std::string what = error.what();
    CHECK(what.find("is 100") != std::string::npos);
    CHECK(what.find("--kv-recent-tokens") != std::string::npos);
  }
}

// The expectation is the definition in words: the first blocks, the current block, and the blocks
// just before it.
TEST_CASE("the 16-bit window holds sinks and the newest blocks, at every block edge") {
  for (const int length : {16, 32, 64, 128}) {
    for (const PrecisionWindowTokens& tokens :
         {PrecisionWindowTokens{64, 64}, {0, 0}, {0, 128}, {128, 0}, {192, 64}}) {
      const PrecisionWindow rule = MakePrecisionWindow(tokens, length);
      for (int position = 0; position < 12 * length; ++position) {
        const int current = position / length;
        for (int block = 0; block <= current; ++block) {
          const bool is_sink = block * length < tokens.sink_tokens;
          // ⌈tokens / length⌉ blocks before the current one.
          const bool is_recent =
              (current - block - 1) * length < tokens.recent_tokens || block == current;
          REQUIRE(rule.IsInWindow16(block, position) == (is_sink || is_recent));
          // SinkEnd and RecentBegin give the same answer in positions.
          const int begin = block * length;
          REQUIRE(rule.IsInWindow16(block, position) ==
                  (begin < rule.SinkEnd() || begin >= rule.RecentBegin(position)));
        }
        REQUIRE(rule.RecentBegin(position) >= rule.SinkEnd());
        REQUIRE(rule.RecentBegin(position) % length == 0);
      }
    }
  }
}

}  // namespace
}  // namespace turbomind
