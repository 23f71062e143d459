#include "turbomind/kv/checkpoint_rule.h"

#include <doctest/doctest.h>

#include <vector>

namespace turbomind {
namespace {

using Kind = CheckpointKind;

// Returns the kinds after blocks 1, 2, ….
std::vector<Kind> Kinds(const CheckpointRule& rule, int64_t num_blocks) {
  std::vector<Kind> kinds;
  for (int64_t n = 1; n <= num_blocks; ++n) {
    kinds.push_back(rule.After(n));
  }
  return kinds;
}

TEST_CASE("the end of the prompt is rounded down so that the same prompt can hit it") {
  const Kind p = Kind::kPrompt;
  const Kind a = Kind::kAnswer;
  const Kind n = Kind::kNone;
  CHECK(Kinds({.block_seq_len = 16, .prompt_tokens = 1}, 2) == std::vector{a, a});
  CHECK(Kinds({.block_seq_len = 16, .prompt_tokens = 16}, 2) == std::vector{a, a});
  CHECK(Kinds({.block_seq_len = 16, .prompt_tokens = 17}, 2) == std::vector{p, a});
  CHECK(Kinds({.block_seq_len = 16, .prompt_tokens = 47}, 4) == std::vector{n, p, a, a});
  // A prompt of whole blocks also ends where its answer begins.
  CHECK(Kinds({.block_seq_len = 16, .prompt_tokens = 48}, 4) == std::vector{n, p, a, a});
  CHECK(Kinds({.block_seq_len = 16, .prompt_tokens = 49}, 4) == std::vector{n, n, p, a});
}

TEST_CASE("an interval divides the prompt, and branches take precedence") {
  const Kind i = Kind::kInterval;
  const Kind p = Kind::kPrompt;
  const Kind a = Kind::kAnswer;
  const Kind b = Kind::kBranch;
  const Kind n = Kind::kNone;
  CheckpointRule rule = {.block_seq_len = 16, .interval = 2, .prompt_tokens = 16 * 6 + 1};
  CHECK(Kinds(rule, 8) == std::vector{n, i, n, i, n, p, a, a});
  rule.branches = {3, 4, 6};
  CHECK(Kinds(rule, 8) == std::vector{n, i, b, b, n, b, a, a});
  CHECK(rule.PromptBlocks() == 6);
  rule.fork = 2;
  CHECK(rule.After(2) == Kind::kFork);
  rule.fork = 4;
  CHECK(rule.After(4) == b);
  rule.branches.clear();
  rule.fork = 6;
  CHECK(rule.After(6) == p);
  CHECK(IsSpareAtFirst(Kind::kFork));
  CHECK(!IsSpareAtFirst(b));
}

}  // namespace
}  // namespace turbomind
