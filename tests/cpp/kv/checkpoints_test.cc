// Which checkpoints a sequence leaves in the prefix cache, and which are evicted first.

#include <doctest/doctest.h>

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

KvCacheConfig Config(std::vector<int> windows = {kNoAttention, 0}) {
  KvCacheConfig config = PoolConfig(windows);
  config.state_bytes = config.checkpoint_bytes = 64;
  return config;
}

// Pools with room for 64 blocks and 4 running sequences, and for 4 saves of a step.
struct StatePools : Pools {
  explicit StatePools(int64_t num_checkpoints, bool prefix = true)
      : Pools(Config(), {64, 8, num_checkpoints}, prefix) {}

  int64_t Hit(const std::vector<int32_t>& prompt) { return manager.CachedTokens(prompt) / kLength; }
  BlockCounts checkpoints() const { return manager.counts(cache.CheckpointPool()); }

  // Runs a prompt and an answer, token by token. The last token is not written.
  void Talk(uint64_t id, const std::vector<int32_t>& prompt, const std::vector<int32_t>& all) {
    manager.Create(id, prompt);
    REQUIRE(Compute(id, prompt));
    REQUIRE(Compute(id, all, 1));
    manager.FreeDataAndScaleBlocks(id);
    manager.CheckIntegrity();
  }
};

// Returns `tokens` and `n` more that begin with `first`.
std::vector<int32_t> Append(std::vector<int32_t> tokens, int n, int first) {
  const std::vector<int32_t> more = Tokens(n, first);
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

TEST_CASE("a prompt leaves a checkpoint that the same prompt and longer ones hit") {
  StatePools pools(8);
  const std::vector<int32_t> prompt = Tokens(4 * kLength);
  pools.RunAndFree(1, prompt);
  CHECK(pools.checkpoints().cached == 2);  // before the last token, and after it
  CHECK(pools.Hit(prompt) == 3);
  CHECK(pools.Hit(Append(prompt, 5, 900)) == 4);
  // Without a checkpoint there, the common blocks are found but cut.
  const std::vector<int32_t> other = Append(Tokens(2 * kLength), 40, 900);
  CHECK(pools.manager.Create(2, other) == 0);
  CHECK(pools.manager.num_cut(2) == 2 * kLength);
  REQUIRE(pools.Compute(2, other));
  pools.manager.FreeDataAndScaleBlocks(2);
  // The second prompt left one where they part.
  CHECK(pools.Hit(Append(Tokens(2 * kLength), 40, 500)) == 2);
}

TEST_CASE("a hit locks its checkpoint until the first step is committed") {
  StatePools pools(8);
  const std::vector<int32_t> prompt = Tokens(3 * kLength + 1);
  pools.RunAndFree(1, prompt);
  CHECK(pools.manager.Create(2, prompt) == 3 * kLength);
  const int32_t checkpoint = pools.manager.CheckpointToRestore(2);
  CHECK(checkpoint >= 0);
  CHECK(pools.checkpoints().active == 1);
  CHECK(pools.manager.StateSlot(2) == -1);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(2, 3 * kLength + 1));
  CHECK(pools.manager.StateSlot(2) >= 0);
  CHECK(pools.manager.CheckpointToRestore(2) == checkpoint);
  pools.manager.Commit(2, prompt);
  CHECK(pools.manager.CheckpointToRestore(2) == -1);
  CHECK(pools.checkpoints().active == 0);
  CHECK(pools.manager.counts(pools.cache.StatePool()).active == 1);
  pools.manager.FreeDataAndScaleBlocks(2);
  CHECK(pools.manager.counts(pools.cache.StatePool()).free == 8);
}

TEST_CASE("saves are planned in order and enter the prefix cache with their tokens") {
  StatePools pools(8);
  const std::vector<int32_t> prompt = Tokens(3 * kLength);
  pools.manager.Create(1, prompt);
  pools.manager.AddBranch(1, 1);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 3 * kLength));
  const auto saves = pools.manager.PlannedSaves(1);
  REQUIRE(saves.size() == 3);
  CHECK(saves[0].position == kLength);
  CHECK(saves[0].kind == CheckpointKind::kBranch);
  CHECK(saves[1].position == 2 * kLength);
  CHECK(saves[1].kind == CheckpointKind::kPrompt);
  CHECK(saves[2].position == 3 * kLength);
  CHECK(saves[2].kind == CheckpointKind::kAnswer);
  // A shorter plan takes their place.
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, kLength + 3));
  REQUIRE(pools.manager.PlannedSaves(1).size() == 1);
  CHECK(pools.checkpoints().active == 1);
  pools.manager.Commit(1, std::span(prompt).first(kLength + 3));
  pools.manager.CheckIntegrity();
  CHECK(pools.checkpoints().cached == 1);
  CHECK(pools.Hit(prompt) == 1);
}

TEST_CASE("an answer keeps only its last checkpoint for good") {
  StatePools pools(3);
  const std::vector<int32_t> prompt = Tokens(2 * kLength + 5);
  const std::vector<int32_t> all = Append(prompt, 10 * kLength, 300);
  pools.Talk(1, prompt, all);
  CHECK(pools.Hit(Append(all, 9, 700)) == 12);
  CHECK(pools.Hit(prompt) == 2);
  // The next prompts take the place of the answer's older checkpoint first.
  pools.RunAndFree(2, Tokens(kLength + 1, 5000));
  CHECK(pools.Hit(prompt) == 2);
  CHECK(pools.Hit(Append(all, 9, 700)) == 12);
  pools.RunAndFree(3, Tokens(kLength + 1, 6000));
  CHECK(pools.Hit(prompt) == 0);
  CHECK(pools.Hit(Append(all, 9, 700)) == 12);
}

TEST_CASE("the ends of prompts or of answers are spare, depending on what prompts continue") {
  for (const bool answers_stay : {true, false}) {
    CAPTURE(answers_stay);
    StatePools pools(8);
    for (int key = 0; key < 3; ++key) {  // two turns each
      const std::vector<int32_t> prompt = Tokens(2 * kLength + 5, 10000 * key);
      const std::vector<int32_t> all = Append(prompt, 3 * kLength, 10000 * key + 3000);
      const auto id = static_cast<uint64_t>(10 * key);
      pools.Talk(id + 1, prompt, all);
      const std::vector<int32_t> next =
          Append(answers_stay ? all : prompt, 2 * kLength, 10000 * key + 6000);
      pools.Talk(id + 2, next, Append(next, 2 * kLength, 10000 * key + 9000));
    }
    const std::vector<int32_t> prompt = Tokens(2 * kLength + 5, 70000);
    const std::vector<int32_t> all = Append(prompt, 3 * kLength, 73000);
    pools.Talk(91, prompt, all);
    // New prompts take the place of all that is spare, and of what was used least recently.
    for (int key = 0; key < 7; ++key) {
      pools.RunAndFree(static_cast<uint64_t>(100 + key), Tokens(kLength + 1, 90000 + 1000 * key));
    }
    CHECK(pools.Hit(prompt) == (answers_stay ? 0 : 2));
    CHECK(pools.Hit(Append(all, 1, 0)) == (answers_stay ? 5 : 2));
  }
}

TEST_CASE("the end of a common beginning is spare until a third prompt has it") {
  const auto kinds = [](StatePools& pools, uint64_t id) {
    const std::vector<int32_t> prompt =
        Append(Tokens(3 * kLength), kLength + 1, 1000 * static_cast<int>(id));
    pools.manager.Create(id, prompt);
    REQUIRE(pools.manager.AllocateDataAndScaleBlocks(id, 4 * kLength + 1));
    std::vector<CheckpointKind> found;
    for (const PlannedSave& save : pools.manager.PlannedSaves(id)) {
      found.push_back(save.kind);
    }
    pools.manager.Commit(id, prompt);
    pools.manager.CheckIntegrity();
    pools.manager.FreeDataAndScaleBlocks(id);
    return found;
  };
  using Kind = CheckpointKind;
  StatePools wide(8);
  CHECK(kinds(wide, 1) == std::vector{Kind::kPrompt});
  CHECK(kinds(wide, 2) == std::vector{Kind::kFork, Kind::kPrompt});
  CHECK(kinds(wide, 3) == std::vector{Kind::kPrompt});  // a hit
  StatePools narrow(2);
  CHECK(kinds(narrow, 1) == std::vector{Kind::kPrompt});
  CHECK(kinds(narrow, 2) == std::vector{Kind::kPrompt});  // no slot for the spare one
  CHECK(kinds(narrow, 3) == std::vector{Kind::kBranch, Kind::kPrompt});
  CHECK(narrow.Hit(Append(Tokens(3 * kLength), 5, 9000)) == 3);
}

TEST_CASE("a prompt that continues the cached text has no branch") {
  StatePools pools(8);
  const std::vector<int32_t> text = Tokens(6 * kLength);
  pools.manager.Create(1, Tokens(8));
  REQUIRE(pools.Compute(1, Tokens(8)));
  REQUIRE(pools.Compute(1, text));  // leaves checkpoints at every block
  pools.manager.FreeDataAndScaleBlocks(1);
  for (int64_t n = pools.checkpoints().cached; n > 0; --n) {
    pools.RunAndFree(static_cast<uint64_t>(10 + n),
                     Tokens(kLength + 1, 5000 + 100 * static_cast<int>(n)));
  }
  for (int n = 0; n < 8; ++n) {
    pools.RunAndFree(static_cast<uint64_t>(50 + n), Tokens(kLength + 1, 9000 + 100 * n));
  }
  const std::vector<int32_t> longer = Append(text, 2 * kLength + 1, 700);
  CHECK(pools.manager.Create(90, longer) == 0);
  CHECK(pools.manager.num_cut(90) == 6 * kLength);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(90, 8 * kLength + 1));
  REQUIRE(pools.manager.PlannedSaves(90).size() == 1);
  CHECK(pools.manager.PlannedSaves(90)[0].kind == CheckpointKind::kPrompt);
}

TEST_CASE("a checkpoint that one hit has used gives way when the prompt of the hit has its own") {
  for (const bool is_shared : {false, true}) {
    StatePools pools(3);
    const std::vector<int32_t> first = Tokens(2 * kLength + 1);
    pools.RunAndFree(1, first);
    if (is_shared) {
      pools.RunAndFree(2, Append(first, 3, 800));  // a hit that leaves no checkpoint of its own
    }
    const std::vector<int32_t> second = Append(first, 2 * kLength, 300);
    pools.RunAndFree(3, second);
    CHECK(pools.checkpoints().cached == 2);
    pools.RunAndFree(4, Tokens(kLength + 1, 5000));
    pools.RunAndFree(5, Tokens(kLength + 1, 6000));
    CHECK(pools.Hit(first) == (is_shared ? 2 : 0));
    CHECK(pools.Hit(second) == (is_shared ? 2 : 4));
  }
}

TEST_CASE("an interval divides a prompt with checkpoints that never take the place of others") {
  MemoryDevice device;
  KvCache cache(device, Config(), {64, 7, 6});
  SequenceManager manager(cache, true, nullptr, 2);
  const std::vector<int32_t> prompt = Tokens(12 * kLength + 1);
  const auto run = [&](uint64_t id, const std::vector<int32_t>& tokens) {
    const auto n = static_cast<int64_t>(tokens.size());
    manager.Create(id, tokens);
    REQUIRE(manager.AllocateDataAndScaleBlocks(id, n));
    manager.Commit(id, tokens);
    manager.FreeDataAndScaleBlocks(id);
    manager.CheckIntegrity(false);
  };
  run(1, prompt);
  CHECK(manager.counts(cache.CheckpointPool()).cached == 6);
  CHECK(manager.CachedTokens(std::span(prompt).first(7 * kLength)) == 6 * kLength);
  for (int i = 0; i < 5; ++i) {
    run(static_cast<uint64_t>(10 + i), Tokens(kLength + 1, 5000 + 1000 * i));
  }
  CHECK(manager.CachedTokens(prompt) == 12 * kLength);  // the end of the prompt outlived the rest
  CHECK(manager.CachedTokens(std::span(prompt).first(7 * kLength)) == 0);
  run(20, Tokens(6 * kLength + 1, 20000));  // takes one slot, from the oldest
  CHECK(manager.CachedTokens(prompt) == 0);
  CHECK(manager.CachedTokens(Tokens(kLength + 1, 5000)) == kLength);
}

TEST_CASE("a draft saves the state after every token but its last one") {
  StatePools pools(4);
  std::vector<int32_t> tokens = Tokens(kLength - 1);
  pools.manager.Create(1, tokens);
  REQUIRE(pools.Compute(1, tokens));
  CHECK(pools.manager.MaxUncertain(1) == 7);
  tokens.push_back(7);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, kLength));
  // The end of the block is in the sequence's own slot.
  REQUIRE(pools.manager.PlannedSaves(1).size() == 1);
  CHECK(pools.manager.PlannedSaves(1)[0].slot == -1);
  CHECK(pools.manager.MaxUncertain(1) == 7);
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(1, kLength + 8, 8));
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, kLength + 3, 3));
  CHECK(pools.manager.MaxUncertain(1) == 7);  // its own saves may be planned anew
  const auto saves = pools.manager.PlannedSaves(1);
  REQUIRE(saves.size() == 3);
  CHECK(saves[0].position == kLength);
  CHECK(saves[0].kind == CheckpointKind::kAnswer);
  CHECK(saves[0].checkpoint >= 0);
  CHECK(saves[2].position == kLength + 2);
  CHECK(saves[2].checkpoint == -1);
  const int32_t second = saves[1].slot;
  tokens.push_back(8);  // one token of the draft is right
  pools.manager.Commit(1, tokens);
  pools.manager.CheckIntegrity();
  CHECK(pools.manager.StateSlot(1) == second);  // the sequence goes on there
  CHECK(pools.manager.CheckpointToRestore(1) == -1);
  CHECK(pools.checkpoints().active == 0);
  CHECK(pools.checkpoints().cached == 1);
  CHECK(pools.manager.MaxUncertain(1) == 7);
  tokens.push_back(9);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, kLength + 3, 1));
  tokens.push_back(10);
  pools.manager.Commit(1, tokens);  // the whole draft is right
  CHECK(pools.manager.StateSlot(1) == second);
}

TEST_CASE("fewer tokens than the certain ones cannot be committed") {
  StatePools pools(4);
  const std::vector<int32_t> tokens = Tokens(20);
  pools.manager.Create(1, tokens);
  REQUIRE(pools.manager.AllocateDataAndScaleBlocks(1, 12, 2));
  CHECK_THROWS_AS(pools.manager.Commit(1, std::span(tokens).first(9)), InternalError);
}

TEST_CASE("working slots bound the sequences that run, and cleared prefixes keep running states") {
  StatePools pools(4);
  for (uint64_t id = 1; id <= 8; ++id) {
    pools.manager.Create(id, Tokens(5));
    REQUIRE(pools.manager.AllocateDataAndScaleBlocks(id, 5));
  }
  pools.manager.Create(9, Tokens(5));
  CHECK(pools.manager.BlocksNeeded(9, pools.cache.StatePool(), 5) == 1);
  CHECK(pools.manager.BlocksToCome(9, pools.cache.StatePool(), 5, 5) == 1);
  CHECK_FALSE(pools.manager.AllocateDataAndScaleBlocks(9, 5));
  pools.manager.FreeDataAndScaleBlocks(2);
  CHECK(pools.manager.AllocateDataAndScaleBlocks(9, 5));

  StatePools other(4);
  const std::vector<int32_t> prompt = Tokens(2 * kLength + 1);
  other.RunAndFree(1, prompt);
  CHECK(other.manager.Create(2, prompt) == 2 * kLength);
  other.manager.ClearPrefixCache();
  other.manager.CheckIntegrity();
  CHECK(other.manager.CheckpointToRestore(2) >= 0);
  REQUIRE(other.Compute(2, prompt));
  CHECK(other.checkpoints().free == 4);
}

TEST_CASE("stored working states and checkpoints of another size are refused") {
  StatePools from(4);
  StatePools to(4);
  const std::vector<int32_t> tokens = Tokens(2 * kLength + 1);
  from.RunAndFree(1, tokens);
  const auto copies = from.manager.ExportBlocks(tokens, 0, 2);
  REQUIRE(copies.size() == 2);
  CHECK(copies[0][2].empty());
  CHECK(copies[1][2].size() == 64);
  const auto import = [&](const std::vector<BlockCopies>& blocks) {
    std::vector<BlockViews> views;
    for (const BlockCopies& block : blocks) {
      views.emplace_back(block.begin(), block.end());
    }
    return to.manager.ImportBlocks(tokens, 0, views);
  };
  auto wrong = copies;
  wrong[0][1].resize(64);
  CHECK_THROWS_AS(import(wrong), InvalidArgument);
  wrong = copies;
  wrong[1][2].pop_back();
  CHECK_THROWS_AS(import(wrong), InvalidArgument);
  wrong = copies;
  wrong[1][2].clear();
  CHECK(import(wrong) == 2);
  CHECK(to.Hit(tokens) == 0);
  CHECK(import(copies) == 2);
  CHECK(to.Hit(tokens) == 2);
}

}  // namespace
}  // namespace turbomind
