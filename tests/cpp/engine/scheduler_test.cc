// Runs plans without computing anything. Tokens come from a rule and not from a model.

#include "turbomind/engine/scheduler.h"

#include <doctest/doctest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/planner.h"
#include "kv/fits.h"

namespace turbomind {
namespace {

using testing::Planner;
using testing::Prompt;

TEST_CASE("prompt chunks share a step with decoding sequences, which come first") {
  Planner planner(4, 20, {64});
  planner.Add(Prompt(0, 30));
  CHECK(planner.Step() == "0:20");
  CHECK(planner.Step() == "0:10");
  planner.Add(Prompt(1, 25));
  planner.Add(Prompt(2, 3));
  CHECK(planner.Step() == "0:1 1:16 2:3");
  CHECK(planner.Step() == "0:1 2:1 1:9");
  CHECK(planner.Step() == "0:1 1:1 2:1");
}

TEST_CASE("max_batch_size and the step's tokens limit the sequences, which run in arrival order") {
  Planner planner(2, 64, {64});
  for (int i = 0; i < 4; ++i) {
    planner.Add(Prompt(i, 4));
  }
  CHECK(planner.Step() == "0:4 1:4");
  CHECK(planner.Step() == "0:1 1:1");
  planner.scheduler.Remove(planner.scheduler.running().front().get());
  CHECK(planner.Step() == "1:1 2:4");

  Planner narrow(8, 3, {64});
  for (int i = 0; i < 4; ++i) {
    narrow.Add(Prompt(i, 1));
  }
  CHECK(narrow.Step() == "0:1 1:1 2:1");
  CHECK(narrow.Step() == "0:1 1:1 2:1");
}

TEST_CASE("a prompt reuses cached prefix blocks") {
  Planner planner(4, 64, {64});
  Sequence* first = planner.Add(Prompt(0, 40));
  CHECK(planner.Step() == "0:40");
  planner.scheduler.Remove(first);
  Sequence* second = planner.Add(Prompt(0, 40));
  CHECK(planner.Step() == "1:8");  // reuses two blocks of 16
  CHECK(second->cached_tokens == 32);
  CHECK(planner.scheduler.stats().prefix_hit_tokens == 32);
  Sequence* third = planner.Add(Prompt(0, 40));
  third->request->num_prompt_logprobs = 0;
  CHECK(planner.Step() == "1:1 2:40");
  CHECK(third->cached_tokens == 0);
}

TEST_CASE("a disabled prefix cache is never queried") {
  Planner planner(4, 64, {64}, {0}, false);
  planner.Add(Prompt(0, 40));
  CHECK(planner.Step() == "0:40");
  CHECK(planner.scheduler.stats().prompt_tokens == 40);
  CHECK(planner.scheduler.stats().prefix_queried_tokens == 0);
}

TEST_CASE("equal prompts that arrive together are computed once") {
  Planner planner(8, 64, {64});
  std::vector<Sequence*> answers;
  for (int i = 0; i < 4; ++i) {
    answers.push_back(planner.Add(Prompt(0, 40)));
  }
  CHECK(planner.Step() == "0:40");
  CHECK(planner.Step() == "0:1 1:8 2:8 3:8");
  CHECK(answers[3]->cached_tokens == 32);
  CHECK(planner.scheduler.stats().prefix_hit_tokens == 3 * 32);
}

TEST_CASE("a prompt that waits for a prefix does not delay a different prompt") {
  Planner planner(8, 256, {64});
  planner.Add(Prompt(0, 40));
  planner.Add(Prompt(0, 40));
  planner.Add(Prompt(1, 40));
  planner.Add(Prompt(1, 40));
  planner.Add(Prompt(1, 40));
  // The last two are equal, and no request follows them.
  CHECK(planner.Step() == "0:40 1:40 2:40");
  CHECK(planner.Step() == "0:1 1:1 2:1 3:8 4:8");
}

TEST_CASE("an equal prompt waits until all chunks of the first are computed") {
  Planner planner(8, 40, {64});
  planner.Add(Prompt(0, 100));
  planner.Add(Prompt(0, 100));
  CHECK(planner.Step() == "0:40");
  CHECK(planner.Step() == "0:40");
  CHECK(planner.Step() == "0:20");
  CHECK(planner.Step() == "0:1 1:4");
}

TEST_CASE("a prompt does not wait for less than half of its tokens or less than a block") {
  std::vector<int32_t> longer = Prompt(0, 40);
  longer.resize(65, 7);
  SUBCASE("32 of 65 tokens are shared") {
    Planner planner(8, 256, {64});
    planner.Add(Prompt(0, 40));
    planner.Add(longer);
    CHECK(planner.Step() == "0:40 1:65");
  }
  SUBCASE("32 of 64 tokens are shared") {
    longer.resize(64);
    Planner planner(8, 256, {64});
    planner.Add(Prompt(0, 40));
    planner.Add(longer);
    CHECK(planner.Step() == "0:40");
    CHECK(planner.Step() == "0:1 1:32");
  }
  SUBCASE("the shared tokens fill no block") {
    Planner planner(8, 256, {64});
    planner.Add(Prompt(0, 15));
    planner.Add(Prompt(0, 15));
    CHECK(planner.Step() == "0:15 1:15");
  }
  SUBCASE("the only shared block contains the last token, which is always computed") {
    Planner planner(8, 256, {64});
    planner.Add(Prompt(0, 16));
    planner.Add(Prompt(0, 16));
    CHECK(planner.Step() == "0:16 1:16");
  }
}

TEST_CASE("a prompt does not wait for blocks that it cannot reuse") {
  SUBCASE("the prefix cache is disabled") {
    Planner planner(8, 256, {64}, {0}, false);
    planner.Add(Prompt(0, 40));
    planner.Add(Prompt(0, 40));
    CHECK(planner.Step() == "0:40 1:40");
  }
  SUBCASE("all logits are requested") {
    Planner planner(8, 256, {64});
    planner.Add(Prompt(0, 40));
    planner.Add(Prompt(0, 40))->request->logits_output = LogitsOutput::kAll;
    CHECK(planner.Step() == "0:40 1:40");
  }
  SUBCASE("the prefix is already computed") {
    Planner planner(8, 20, {64});
    planner.Add(Prompt(0, 36));
    CHECK(planner.Step() == "0:20");
    CHECK(planner.Step() == "0:16");
    planner.Add(Prompt(0, 36));
    CHECK(planner.Step() == "0:1 1:4");
  }
}

TEST_CASE("the newest sequence is preempted and resumes first, with its tokens as prompt") {
  Planner planner(4, 64, {5}, {0}, false);  // 80 tokens
  planner.Add(Prompt(0, 30));
  Sequence* newest = planner.Add(Prompt(1, 30));
  planner.Add(Prompt(2, 30));
  CHECK(planner.Step() == "0:30 1:30");  // sequence 2 does not fit yet
  CHECK(planner.Step() == "0:1 1:1");
  CHECK(planner.Step() == "0:1 1:1");
  CHECK(planner.Step() == "0:1");  // 0 takes a third block; 1 would need a sixth
  CHECK(planner.scheduler.stats().num_preemptions == 1);
  CHECK(newest->num_computed == 0);
  CHECK(newest->num_tokens() == 33);
  CHECK(planner.scheduler.waiting().front().get() == newest);
  planner.scheduler.Remove(planner.scheduler.running().front().get());
  CHECK(planner.Step() == "1:33 2:30");
}

TEST_CASE("smaller requests do not overtake an earlier large request") {
  Planner planner(8, 256, {8});
  Sequence* small = planner.Add(Prompt(0, 20));
  planner.Add(Prompt(1, 120));
  planner.Add(Prompt(2, 1));
  CHECK(planner.Step() == "0:20");
  CHECK(planner.Step() == "0:1");
  planner.scheduler.Remove(small);
  CHECK(planner.Step() == "1:120");
}

TEST_CASE("a batch has the tables of both pools and every sequence's pending quantizations") {
  Planner planner(4, 200, {32, 8, 32, 32}, {0, 40}, false, {0, 0});
  planner.Add(Prompt(0, 40));
  planner.Add(Prompt(1, 80));
  const Batch& batch = planner.scheduler.Plan();
  REQUIRE(batch.num_seqs() == 2);
  REQUIRE(batch.tables.size() == 2);
  const std::span<const BatchView> views = batch.Views();
  const Batch::BlockTables& full = batch.tables[0];
  CHECK(full.stride == 5);
  REQUIRE(full.window16_ids.size() == 10);
  REQUIRE(full.blocks_to_quantize.size() == 2 + 4);
  CHECK(views[0].window16_tables == full.window16_ids.data());
  CHECK(views[0].num_to_quantize == 6);
  size_t next = 0;
  for (size_t row : {0, 1}) {
    const size_t num_blocks = row == 0 ? 3 : 5;
    for (size_t i = 0; i < 5; ++i) {
      CHECK((full.window16_ids[5 * row + i] >= 0) == (i < num_blocks));
      CHECK((full.ids[5 * row + i] >= 0) == (i + 1 < num_blocks));
      if (i + 1 < num_blocks) {
        CHECK(full.blocks_to_quantize[next].window16 == full.window16_ids[5 * row + i]);
        CHECK(full.blocks_to_quantize[next].quantized == full.ids[5 * row + i]);
        ++next;
      }
    }
  }
  planner.scheduler.StepDone();
  planner.manager.CheckIntegrity(false);
  for (Sequence* sequence :
       {planner.scheduler.running()[0].get(), planner.scheduler.running()[1].get()}) {
    sequence->tokens.push_back(7);
  }
  const Batch& second = planner.scheduler.Plan();
  CHECK(second.tables[0].blocks_to_quantize.size() ==
        1);  // 1 begins its sixth block, 0 is in its third
  CHECK(second.tables[1].blocks_to_quantize.size() == 1);
  CHECK(second.tables[0].window16_ids[2] >= 0);
}

TEST_CASE("without a 16-bit window there are no 16-bit tables") {
  Planner planner(4, 200, {32});
  planner.Add(Prompt(0, 40));
  const Batch& batch = planner.scheduler.Plan();
  CHECK(batch.tables[0].window16_ids.empty());
  CHECK(batch.tables[0].blocks_to_quantize.empty());
  CHECK(batch.Views()[0].window16_tables == nullptr);
}

TEST_CASE("a prompt starts when the 16-bit blocks of its chunk fit") {
  // Each prompt takes up to 1 + 4 blocks of the 16-bit pool while it is computed, and one
  // afterwards.
  Planner planner(4, 64, {64, 9}, {0}, false, {0, 0});
  planner.Add(Prompt(0, 100));
  planner.Add(Prompt(1, 100));
  planner.Add(Prompt(2, 100));
  CHECK(planner.Step() == "0:64");
  CHECK(planner.Step() == "0:36 1:28");
  CHECK(planner.Step() == "0:1 1:63");
  CHECK(planner.Step() == "0:1 1:9 2:54");
  CHECK(planner.scheduler.stats().num_preemptions == 0);
  // If the pool holds only one sequence, they run one after the other.
  Planner narrow(4, 64, {64, 5}, {0}, false, {0, 0});
  Sequence* first = narrow.Add(Prompt(0, 100));
  narrow.Add(Prompt(1, 100));
  REQUIRE(testing::Fits(narrow.cache, 120, 64));
  CHECK(narrow.Step() == "0:64");
  CHECK(narrow.Step() == "0:36");
  CHECK(narrow.Step() == "0:1");
  narrow.scheduler.Remove(first);
  CHECK(narrow.Step() == "1:64");
}

TEST_CASE("the newest sequence is preempted when the 16-bit pool is full") {
  // Each sequence keeps its sinks, recent blocks and current block: 4 + 4 + 1 of 16 blocks.
  Planner planner(4, 64, {64, 16}, {0}, true, {64, 64});
  planner.Add(Prompt(0, 60));
  planner.Add(Prompt(1, 60));
  CHECK(planner.Step() == "0:60 1:4");
  int64_t steps = 0;
  while (planner.scheduler.stats().num_preemptions == 0) {
    planner.Step();
    REQUIRE(++steps < 300);
  }
  CHECK(planner.scheduler.running().size() == 1);
  CHECK(planner.scheduler.running().front()->arrival == 0);
  for (int i = 0; i < 200; ++i) {
    CHECK_FALSE(planner.Step().empty());
  }
}

TEST_CASE("tokens that a hit lost to missing 16-bit copies are counted once") {
  Planner planner(4, 64, {64, 10}, {0}, true, {0, 64});
  Sequence* first = planner.Add(Prompt(0, 130));
  planner.Step();
  planner.Step();
  planner.Step();
  planner.scheduler.Remove(first);  // 4 to 7 exist only in 16 bits, 0 to 3 in both pools
  Sequence* other = planner.Add(Prompt(1, 80));
  planner.Step();
  planner.Step();
  planner.scheduler.Remove(other);
  planner.Add(Prompt(0, 60));
  planner.Step();
  CHECK(planner.scheduler.stats().prefix_cut_tokens == 48);
  CHECK(planner.scheduler.stats().prefix_hit_tokens == 0);
}

struct Load {
  std::vector<int64_t> num_blocks;
  std::vector<int> windows;
  PrecisionWindowTokens window16;
  int max_step_tokens = 24;
};

// Runs a random load on tiny pools and checks that every sequence ends and every block is freed.
// Returns the plans.
std::string RunLoad(const Load& load) {
  std::mt19937 random(3);
  Planner planner(5, load.max_step_tokens, load.num_blocks, load.windows, true, load.window16);
  std::vector<std::pair<Sequence*, int64_t>> open;  // and the length at which each ends
  std::string log;
  int num_started = 0;
  for (int step = 0; num_started < 300 || !open.empty(); ++step) {
    REQUIRE(step < 20'000);
    if (num_started < 300 && random() % 3 == 0) {
      const auto length = static_cast<int>(1 + random() % 100);
      const auto total = static_cast<int64_t>(length + 1 + random() % 50);
      Sequence* sequence = planner.Add(Prompt(static_cast<int>(random() % 6), length));
      REQUIRE(testing::Fits(planner.cache, total, load.max_step_tokens));
      open.emplace_back(sequence, total);
      ++num_started;
    }
    log += planner.Step();
    log += "\n";
    for (size_t i = 0; i < open.size();) {
      if (open[i].first->num_tokens() >= open[i].second || random() % 500 == 0) {
        planner.scheduler.Remove(open[i].first);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }
  CHECK(planner.scheduler.stats().num_preemptions > 0);
  CHECK(planner.scheduler.stats().prefix_hit_tokens > 0);
  planner.manager.ClearPrefixCache();
  for (int pool = 0; pool < planner.manager.num_pools(); ++pool) {
    CHECK(planner.manager.counts(pool).free == planner.manager.counts(pool).total);
  }
  return log;
}

// Returns the lengths of the drafts of sequences that repeat one token. Linear layers take a fifth
// of the time that a step with one sequence takes.
std::vector<size_t> DraftLengths(int num_sequences) {
  Planner planner({16, 1024, {.step = 40'000, .token = 10'000, .logits = 2'700}, 1024}, {64});
  std::vector<Sequence*> sequences;
  for (int i = 0; i < num_sequences; ++i) {
    sequences.push_back(planner.Add(Prompt(i, 40)));
    sequences.back()->request->max_new_tokens = 100;
    sequences.back()->drafter = std::make_unique<NgramDrafter>(1024, 8);
  }
  planner.Step();
  for (Sequence* sequence : sequences) {
    sequence->tokens.back() = sequence->tokens.front();
  }
  planner.scheduler.Plan();
  std::vector<size_t> lengths;
  for (const Sequence* sequence : sequences) {
    lengths.push_back(sequence->draft.size());
  }
  return lengths;
}

TEST_CASE("drafts are as long as they pay") {
  CHECK(DraftLengths(1) == std::vector<size_t>{2});
  CHECK(DraftLengths(16) == std::vector<size_t>(16, 0));
}

TEST_CASE("random requests all finish, and equal loads give equal plans") {
  const Load load = {{14, 9}, {0, 20}, {}, 24};
  CHECK(RunLoad(load) == RunLoad(load));
}

// The pools are as small as Fits allows for the longest sequence, 150 tokens or 10 blocks.
TEST_CASE("random requests finish with 16-bit pools that hold little more than one sequence") {
  for (const int max_step_tokens : {5, 24, 150}) {
    for (const PrecisionWindowTokens& window16 :
         {PrecisionWindowTokens{0, 0}, {64, 0}, {0, 64}, {64, 64}}) {
      for (const std::vector<int>& windows : {std::vector<int>{0}, {0, 20}, {40}, {0, 90}}) {
        for (const int64_t spare : {0, 3}) {
          Load load = {{}, windows, window16, max_step_tokens};
          const auto groups = MakeLayerGroups(Planner::Config(windows, window16));
          for (const LayerGroup& group : groups) {
            load.num_blocks.push_back(
                std::max<int64_t>(group.BlocksPerSequence(150, max_step_tokens), 1) + spare);
          }
          for (const LayerGroup& group : groups) {
            load.num_blocks.push_back(group.Window16BlocksPerSequence(150, max_step_tokens) +
                                      spare);
          }
          CAPTURE(max_step_tokens);
          CAPTURE(window16.sink_tokens);
          CAPTURE(window16.recent_tokens);
          CAPTURE(windows.back());
          CAPTURE(spare);
          CHECK(RunLoad(load) == RunLoad(load));
        }
      }
    }
  }
}

}  // namespace
}  // namespace turbomind
