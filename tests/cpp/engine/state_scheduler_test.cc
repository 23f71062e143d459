// Plans of a model with recurrent layers: which states a step reads, saves and restores. A device
// computes a state as a hash of the tokens, from the batch alone.

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/planner.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using testing::kTokensOnly;
using testing::Planner;
using testing::Prompt;

constexpr int64_t kMaxLength = 200;

KvCacheConfig StateConfig() {
  KvCacheConfig config = Planner::Config({kNoAttention, 0, kNoAttention}, {});
  config.state_bytes = config.checkpoint_bytes = 64;
  return config;
}

SchedulerConfig Limits(int max_batch_size, int max_step_tokens) {
  return {max_batch_size, max_step_tokens, kTokensOnly, kMaxLength};
}

// Proposes up to `max_draft` random tokens.
class RandomDrafter : public Drafter {
 public:
  RandomDrafter(int max_draft, uint32_t seed) : max_draft_(max_draft), random_(seed) {}
  void Update(std::span<const int32_t>) override {
    candidate_.clear();
    for (int n = static_cast<int>(random_() % static_cast<unsigned>(max_draft_ + 1)); n > 0; --n) {
      candidate_.push_back(static_cast<int32_t>(random_() % 3));
    }
  }
  std::span<const int32_t> candidate() const override { return candidate_; }
  double acceptance() const override { return 0.9; }

 private:
  int max_draft_;
  std::mt19937 random_;
  std::vector<int32_t> candidate_;
};

uint64_t Mix(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint64_t>(static_cast<uint32_t>(token))) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

// The states of a device: they change only as batches say.
struct HashDevice {
  HashDevice(int64_t num_slots, int64_t num_checkpoints)
      : working(static_cast<size_t>(num_slots), 99),
        checkpoints(static_cast<size_t>(num_checkpoints), 98) {}

  // Throws InternalError if a sequence's state is not that of its tokens.
  void Run(const Batch& batch) {
    for (const StateCopy& restore : batch.restores) {
      working.at(static_cast<size_t>(restore.slot)) =
          checkpoints.at(static_cast<size_t>(restore.checkpoint));
      ++num_restores;
    }
    const StateBatch states = batch.States();
    int next = 0;
    for (int s = 0; s < batch.num_seqs(); ++s) {
      const int begin = batch.cu_seqlens[static_cast<size_t>(s)];
      const int end = batch.cu_seqlens[static_cast<size_t>(s) + 1];
      uint64_t& slot = working.at(static_cast<size_t>(states.slots[s]));
      const Sequence& sequence = *batch.sequences[static_cast<size_t>(s)];
      uint64_t state = batch.positions[static_cast<size_t>(begin)] == 0 ? 1 : slot;
      uint64_t expected = 1;
      for (int64_t i = 0; i < sequence.num_computed; ++i) {
        expected = Mix(expected, sequence.tokens[static_cast<size_t>(i)]);
      }
      Check(state == expected, "a step must begin with the state of the computed tokens");
      for (int t = begin; t < end; ++t) {
        state = Mix(state, batch.tokens[static_cast<size_t>(t)]);
        while (next < states.num_saves && states.saves[next].sequence == s &&
               states.saves[next].num_tokens == t + 1 - begin) {
          Check(t + 1 < end, "the last state must be in the sequence's slot");
          working.at(static_cast<size_t>(states.saves[next++].slot)) = state;
        }
      }
      slot = state;
    }
    Check(next == states.num_saves, "saves must be in order and within the step");
    for (const StateCopy& copy : batch.checkpoints) {
      checkpoints.at(static_cast<size_t>(copy.checkpoint)) =
          working.at(static_cast<size_t>(copy.slot));
      ++num_checkpoints_made;
    }
  }

  std::vector<uint64_t> working;
  std::vector<uint64_t> checkpoints;
  int64_t num_restores = 0;
  int64_t num_checkpoints_made = 0;
};

// Accepts a random part of every draft, as the output processor does, and appends one more token.
void Choose(const Batch& batch, std::mt19937& random) {
  for (Sequence* sequence : batch.sequences) {
    if (sequence->num_computed + sequence->num_planned < sequence->num_tokens()) {
      continue;
    }
    const auto accepted = random() % (sequence->draft.size() + 1);
    for (size_t i = 0; i < accepted; ++i) {
      sequence->tokens.push_back(sequence->draft[i]);
    }
    sequence->tokens.push_back(static_cast<int32_t>(random() % 3));
  }
}

struct Load {
  std::vector<int64_t> num_blocks;  // KV, working slots, checkpoints
  int max_batch_size = 4;
  int max_step_tokens = 64;
  int max_draft = 4;
  bool prefix_caching = true;
};

struct Totals {
  SchedulerStats stats;
  int64_t num_restores = 0;
  int64_t num_checkpoints_made = 0;
  int64_t num_drafted = 0;
  int64_t num_ended = 0;
};

// Runs random requests until a number of steps, with aborts, and returns what happened.
Totals RunLoad(const Load& load, int num_steps) {
  Planner planner(Limits(load.max_batch_size, load.max_step_tokens), StateConfig(), load.num_blocks,
                  load.prefix_caching);
  HashDevice device(load.num_blocks[1], load.num_blocks[2]);
  std::mt19937 random(5);
  const auto below = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  std::vector<std::vector<int32_t>> texts(3);
  for (auto& text : texts) {
    for (int i = 0; i < 120; ++i) {
      text.push_back(below(3));
    }
  }
  Totals totals;
  for (int step = 0; step < num_steps; ++step) {
    if (planner.scheduler.waiting().size() < 3 && below(3) == 0) {
      const auto& text = texts[static_cast<size_t>(below(3))];
      std::vector<int32_t> prompt(text.begin(), text.begin() + 1 + below(119));
      prompt.push_back(below(3));
      Sequence* sequence = planner.Add(std::move(prompt), below(2));
      sequence->request->max_new_tokens = 1000;
      sequence->drafter = std::make_unique<RandomDrafter>(load.max_draft, random());
    }
    const Batch& batch = planner.scheduler.Plan();
    device.Run(batch);
    Choose(batch, random);
    for (const Sequence* sequence : batch.sequences) {
      totals.num_drafted += static_cast<int64_t>(sequence->draft.size());
    }
    planner.scheduler.StepDone();
    planner.manager.CheckIntegrity(false);
    std::vector<const Sequence*> ended;
    for (const auto* queue : {&planner.scheduler.running(), &planner.scheduler.waiting()}) {
      for (const auto& sequence : *queue) {
        if (sequence->num_tokens() > 150 || below(60) == 0) {
          ended.push_back(sequence.get());
        }
      }
    }
    for (const Sequence* sequence : ended) {
      planner.scheduler.Remove(sequence);
      ++totals.num_ended;
    }
  }
  while (!planner.scheduler.running().empty()) {
    planner.scheduler.Remove(planner.scheduler.running().front().get());
  }
  planner.manager.ClearPrefixCache();
  for (int pool = 0; pool < planner.manager.num_pools(); ++pool) {
    const BlockCounts counts = planner.manager.counts(pool);
    CHECK(counts.free == counts.total);
  }
  totals.stats = planner.scheduler.stats();
  totals.num_restores = device.num_restores;
  totals.num_checkpoints_made = device.num_checkpoints_made;
  return totals;
}

TEST_CASE("states follow the tokens through any plans") {
  for (const Load& load :
       {Load{{40, 8, 16}}, Load{{13, 6, 5}}, Load{{60, 12, 40}, 8, 200}, Load{{40, 7, 16}, 4, 7}}) {
    CAPTURE(load.num_blocks[2]);
    const Totals totals = RunLoad(load, 4000);
    CHECK(totals.stats.prefix_hit_tokens > 500);
    CHECK(totals.stats.prefix_cut_tokens > 100);
    CHECK(totals.num_restores > 50);
    CHECK(totals.num_checkpoints_made > 100);
    CHECK(totals.num_drafted > 1000);
    CHECK(totals.num_ended > 100);
    MESSAGE("hits " << totals.stats.prefix_hit_tokens << ", cut " << totals.stats.prefix_cut_tokens
                    << ", preemptions " << totals.stats.num_preemptions << ", restores "
                    << totals.num_restores << ", drafted " << totals.num_drafted << ", ended "
                    << totals.num_ended);
  }
}

TEST_CASE("drafts need no checkpoints") {
  const Totals totals = RunLoad({{40, 6, 0}}, 1000);
  CHECK(totals.num_drafted > 100);
  CHECK(totals.num_restores == 0);
  CHECK(totals.stats.prefix_hit_tokens == 0);
  const Totals uncached = RunLoad({.num_blocks = {40, 6, 5}, .prefix_caching = false}, 1000);
  CHECK(uncached.num_drafted > 100);
  CHECK(uncached.stats.prefix_queried_tokens == 0);
}

TEST_CASE("a draft leaves a slot to every sequence that has none") {
  Planner planner(Limits(1, 64), StateConfig(), {64, 1, 3});
  Sequence* only = planner.Add(Prompt(0, 5));
  only->request->max_new_tokens = 100;
  only->drafter = std::make_unique<RandomDrafter>(6, 1);
  for (int step = 0; step < 20; ++step) {
    planner.scheduler.Plan();
    CHECK(only->draft.empty());
    only->tokens.push_back(1);
    planner.scheduler.StepDone();
  }
  // Two slots are left, and the second prompt has none of them yet.
  Planner two(Limits(2, 64), StateConfig(), {64, 3, 8});
  Sequence* first = two.Add(Prompt(0, 5));
  first->request->max_new_tokens = 100;
  CHECK(two.Step() == "0:5");
  two.Add(Prompt(1, 5));
  class One : public RandomDrafter {
   public:
    One() : RandomDrafter(1, 0) {}
    std::span<const int32_t> candidate() const override { return tokens_; }

   private:
    std::vector<int32_t> tokens_ = {1, 2, 3};
  };
  first->drafter = std::make_unique<One>();
  const Batch& batch = two.scheduler.Plan();
  CHECK(first->draft.size() == 1);
  CHECK(batch.num_seqs() == 2);
}

TEST_CASE("a draft is as long as the slots allow") {
  Planner planner(Limits(4, 64), StateConfig(), {64, 4, 3});
  Sequence* sequence = planner.Add(Prompt(0, 5));
  sequence->request->max_new_tokens = 100;
  class Six : public RandomDrafter {
   public:
    Six() : RandomDrafter(6, 0) {}
    std::span<const int32_t> candidate() const override { return tokens_; }

   private:
    std::vector<int32_t> tokens_ = {1, 2, 3, 4, 5, 6};
  };
  sequence->drafter = std::make_unique<Six>();
  CHECK(planner.Step() == "0:5");
  const Batch& batch = planner.scheduler.Plan();
  CHECK(sequence->draft.size() == 3);
  CHECK(batch.num_tokens() == 4);
  REQUIRE(batch.saves.size() == 3);
  for (int i = 0; i < 3; ++i) {
    CHECK(batch.saves[static_cast<size_t>(i)].num_tokens == i + 1);
  }
  sequence->tokens.push_back(1);  // one token of the draft is right
  sequence->tokens.push_back(7);
  const int32_t slot = batch.saves[1].slot;
  planner.scheduler.StepDone();
  const Batch& next = planner.scheduler.Plan();
  CHECK(sequence->draft.size() == 3);
  CHECK(next.restores.empty());  // the state after that token is in the slot where it was saved
  CHECK(next.state_slots[0] == slot);
}

TEST_CASE("questions about one text wait for it and begin at the checkpoint where they part") {
  Planner planner(Limits(8, 64), StateConfig(), {64, 8, 16});
  const auto question = [](int key) {
    std::vector<int32_t> prompt = Prompt(0, 50);
    prompt.resize(70, 7 + key);
    return prompt;
  };
  std::vector<Sequence*> questions;
  for (int key = 0; key < 3; ++key) {
    questions.push_back(planner.Add(question(key)));
  }
  CHECK(planner.Step() == "0:64");
  // The first prompt saved its state after 48 tokens.
  CHECK(planner.Step() == "0:6 1:22 2:22");
  CHECK(questions[2]->cached_tokens == 48);
}

TEST_CASE("a sequence waits for a working slot") {
  Planner planner(Limits(4, 64), StateConfig(), {64, 2, 8});
  Sequence* first = planner.Add(Prompt(0, 4));
  planner.Add(Prompt(1, 4));
  planner.Add(Prompt(2, 4));
  CHECK(planner.Step() == "0:4 1:4");
  CHECK(planner.Step() == "0:1 1:1");
  planner.scheduler.Remove(first);
  CHECK(planner.Step() == "1:1 2:4");
  CHECK(planner.scheduler.stats().num_preemptions == 0);
}

TEST_CASE("a model without recurrent layers has no states") {
  Planner planner(4, 64, {64});
  planner.Add(Prompt(0, 40));
  const Batch& batch = planner.scheduler.Plan();
  CHECK(batch.state_slots.empty());
  CHECK(batch.saves.empty());
  CHECK(batch.checkpoints.empty());
  CHECK(batch.restores.empty());
}

}  // namespace
}  // namespace turbomind
