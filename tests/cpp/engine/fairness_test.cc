// How a step is shared among prompts and answers: priorities, bounds and starvation.

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "engine/planner.h"
#include "turbomind/engine/scheduler.h"
#include "turbomind/engine/step_cost.h"

namespace turbomind {
namespace {

using testing::Planner;
using testing::Prompt;

// A step costs as much as 4 tokens. The attention of a token to 100
// positions costs as much as its linear layers.
constexpr StepCost kCost = {.step = 400, .token = 100, .logits = 20};
constexpr int kStepTokens = 64;
constexpr int kAgingSteps = Scheduler::kAgingSteps;

Planner MakePlanner(int max_batch_size, int64_t num_blocks = 4096) {
  return Planner(SchedulerConfig{max_batch_size, kStepTokens, kCost}, {num_blocks});
}

// Runs steps until the sequence has a token of its answer. Returns their number.
int StepsToFirstToken(Planner& planner, const Sequence* sequence) {
  int steps = 0;
  while (sequence->num_generated() == 0) {
    planner.Step();
    REQUIRE(++steps < 10'000);
  }
  return steps;
}

TEST_CASE("a short prompt is read in the next step, and the long one in the rest of that step") {
  Planner planner = MakePlanner(8);
  Sequence* longer = planner.Add(Prompt(0, 2000));
  planner.Step();
  const int64_t before = longer->num_computed;
  Sequence* shorter = planner.Add(Prompt(1, 16));
  CHECK(StepsToFirstToken(planner, shorter) == 1);
  // The long prompt costs no more than the step (400) and the short prompt (1,600).
  CHECK(longer->num_computed > before);
  CHECK(kCost.Chunk(planner.cache.groups(), before, longer->num_computed) <= 2100);
}

TEST_CASE("a step takes less than twice as long while a prompt is read") {
  Planner planner = MakePlanner(32);
  for (int i = 0; i < 16; ++i) {
    planner.Add(Prompt(i, 1));
  }
  planner.Step();
  Sequence* longer = planner.Add(Prompt(99, 4000));
  const auto& groups = planner.cache.groups();
  int64_t cost_of_all = 0;
  int64_t cost_of_prompt = 0;
  while (longer->num_generated() == 0) {
    int64_t decode = kCost.step;
    for (const auto& sequence : planner.scheduler.running()) {
      if (sequence.get() != longer) {
        decode +=
            kCost.Chunk(groups, sequence->num_computed, sequence->num_computed + 1) + kCost.logits;
      }
    }
    const int64_t begin = longer->num_computed;
    planner.Step();
    const int64_t prompt = kCost.Chunk(groups, begin, longer->num_computed);
    CHECK(prompt < decode);
    cost_of_all += decode + prompt;
    cost_of_prompt += prompt;
  }
  CHECK(static_cast<double>(cost_of_prompt) / static_cast<double>(cost_of_all) > 0.4);
}

TEST_CASE("a chunk has at least four tokens, even if they cost more than the budget") {
  Planner planner = MakePlanner(8);
  Sequence* longer = planner.Add(Prompt(0, 4001));
  Sequence* longest = planner.Add(Prompt(1, 5000));
  while (longer->num_computed < 3900) {
    planner.Step();
  }
  planner.Add(Prompt(2, 1));
  planner.Step();
  while (longer->num_missing() > 1) {
    const int64_t before = longer->num_computed;
    const int64_t before_longest = longest->num_computed;
    const int64_t wanted = std::min(Scheduler::kMinChunk, longer->num_missing());
    planner.Step();
    CHECK(longer->num_computed - before == wanted);
    CHECK(longest->num_computed == before_longest);
  }
}

TEST_CASE("requests with a lower priority value start earlier") {
  Planner planner = MakePlanner(2);
  planner.Add(Prompt(0, 600));
  planner.Step();
  planner.Add(Prompt(1, 60));
  Sequence* later = planner.Add(Prompt(2, 1000));
  Sequence* urgent = planner.Add(Prompt(3, 500), -1);
  planner.Step();
  REQUIRE(planner.scheduler.running().size() == 2);
  CHECK(planner.scheduler.running().front().get() == urgent);
  CHECK(planner.scheduler.waiting().back().get() == later);
}

TEST_CASE("among running prompts, the priority counts before the length") {
  Planner planner = MakePlanner(4);
  Sequence* shorter = planner.Add(Prompt(0, 200));
  Sequence* urgent = planner.Add(Prompt(1, 300), -1);
  Sequence* patient = planner.Add(Prompt(2, 40), 1);
  StepsToFirstToken(planner, urgent);
  CHECK(shorter->num_generated() == 0);
  StepsToFirstToken(planner, shorter);
  CHECK(patient->num_generated() == 0);
}

TEST_CASE("a long prompt gets its share, however many short ones arrive") {
  Planner planner = MakePlanner(8);
  Sequence* longer = planner.Add(Prompt(0, 1500), 7);
  int key = 1;
  int steps_without = 0;
  for (int steps = 0; longer->num_generated() == 0; ++steps) {
    REQUIRE(steps < 1000);
    for (int i = 0; i < 4; ++i) {
      planner.Add(Prompt(key, 60), -key);
      ++key;
    }
    const int64_t before = longer->num_computed;
    planner.Step();
    steps_without = longer->num_computed > before ? 0 : steps_without + 1;
    CHECK(steps_without < kAgingSteps);
    while (planner.scheduler.running().size() > 4) {  // answers end, so that others can start
      const auto& running = planner.scheduler.running();
      const auto other = std::ranges::find_if(
          running, [&](const auto& sequence) { return sequence.get() != longer; });
      planner.scheduler.Remove(other->get());
    }
  }
}

TEST_CASE("a request of low priority starts and ends, however many others arrive") {
  // The pool holds little more than two sequences, so sequences are preempted, too.
  Planner planner = MakePlanner(2, 16);
  planner.Add(Prompt(1, 100));
  planner.Step();
  Sequence* patient = planner.Add(Prompt(0, 120), 100);
  std::vector<Sequence*> others;
  int steps = 0;
  for (int key = 2; patient->num_generated() < 40; ++key) {
    REQUIRE(++steps < 3000);
    if (planner.scheduler.waiting().size() < 20) {
      planner.Add(Prompt(key, 100));
    }
    planner.Step();
    const Sequence* ended = nullptr;
    for (const auto& sequence : planner.scheduler.running()) {
      ended = sequence.get() != patient && sequence->num_generated() > 40 ? sequence.get() : ended;
    }
    if (ended != nullptr) {
      planner.scheduler.Remove(ended);
    }
  }
  CHECK(planner.scheduler.stats().num_preemptions > 0);
}

// Checks the invariants of scheduler.h while random requests arrive, end and are cancelled.
struct RandomLoad {
  explicit RandomLoad(unsigned seed)
      : random(seed), planner(SchedulerConfig{6, 24, kCost}, {40, 30}, {0, 20}) {}

  void Arrive() {
    const int length = static_cast<int>(random() % 4 == 0 ? 1 + random() % 300 : 1 + random() % 40);
    const int priority = static_cast<int>(random() % 5) - 2;
    Sequence* sequence = planner.Add(Prompt(static_cast<int>(random() % 40), length), priority);
    open.emplace_back(sequence, length + 1 + static_cast<int64_t>(random() % 30));
  }

  // Returns the oldest running prompt, null if there is none.
  const Sequence* OldestPrompt() const {
    const Sequence* oldest = nullptr;
    for (const auto& sequence : planner.scheduler.running()) {
      if (sequence->num_missing() > 1 &&
          (oldest == nullptr || sequence->arrival < oldest->arrival)) {
        oldest = sequence.get();
      }
    }
    return oldest;
  }

  // Returns the arrivals of the running sequences that are older than `arrival`.
  std::vector<uint64_t> OlderThan(uint64_t arrival) const {
    std::vector<uint64_t> older;
    for (const auto& sequence : planner.scheduler.running()) {
      if (sequence->arrival < arrival) {
        older.push_back(sequence->arrival);
      }
    }
    std::ranges::sort(older);
    return older;
  }

  void Step() {
    const Sequence* oldest = OldestPrompt();
    const int64_t before = oldest != nullptr ? oldest->num_computed : 0;
    const auto older = OlderThan(oldest != nullptr ? oldest->arrival : 0);
    steps_without = oldest == last_oldest ? steps_without : 0;
    last_oldest = oldest;
    CHECK_FALSE(planner.Step().empty());
    if (oldest != nullptr) {
      // If an older sequence has started, it was the oldest in this step.
      const bool advanced = oldest->num_computed != before;
      const bool is_oldest = std::ranges::includes(older, OlderThan(oldest->arrival));
      steps_without = advanced || !is_oldest ? 0 : steps_without + 1;
      CHECK(steps_without < kAgingSteps);
    }
  }

  void End() {
    for (auto it = open.begin(); it != open.end();) {
      if (it->first->num_tokens() >= it->second || random() % 300 == 0) {
        last_oldest = last_oldest == it->first ? nullptr : last_oldest;
        planner.scheduler.Remove(it->first);
        it = open.erase(it);
      } else {
        ++it;
      }
    }
  }

  std::mt19937 random;
  Planner planner;
  std::vector<std::pair<Sequence*, int64_t>> open;  // and the length at which each ends
  const Sequence* last_oldest = nullptr;
  int steps_without = 0;
};

TEST_CASE("random requests of all priorities end, the oldest prompt advances, blocks are freed") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    RandomLoad load(seed);
    int steps = 0;
    for (int num_started = 0; num_started < 150 || !load.open.empty(); ++steps) {
      REQUIRE(steps < 20'000);
      while (num_started < 150 && (load.open.empty() || load.random() % 4 == 0)) {
        load.Arrive();
        ++num_started;
      }
      load.Step();
      load.End();
    }
    load.planner.manager.ClearPrefixCache();
    for (int pool = 0; pool < load.planner.manager.num_pools(); ++pool) {
      const BlockCounts counts = load.planner.manager.counts(pool);
      CHECK(counts.free == counts.total);
    }
  }
}

TEST_CASE("a sliding window limits the cost of attention") {
  const auto groups = MakeLayerGroups(Planner::Config({0, 20}, {}));
  // A chunk of n tokens costs n times 100, and n + 2.5 times what its middle token attends to.
  CHECK(kCost.Chunk(groups, 0, 1) == 100 + 7 * (1 + 1) / 2);
  const int64_t cost = 10 * 100 + 25 * (1006 + 20) / 2;
  CHECK(kCost.Chunk(groups, 1000, 1010) == cost);
  CHECK(kCost.TokensFor(groups, 1000, 64, cost) == 10);
  CHECK(kCost.TokensFor(groups, 1000, 64, cost - 1) == 9);
  CHECK(kCost.TokensFor(groups, 1000, 5, 1'000'000) == 5);
  CHECK(kCost.TokensFor(groups, 1000, 64, 100) == 0);
}

}  // namespace
}  // namespace turbomind
