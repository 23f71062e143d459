// Plans replayed without computing anything: tokens come from a rule, not from a model.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "turbomind/engine/scheduler.h"

#include <doctest/doctest.h>

#include <random>
#include <string>

#include "engine/null_device.h"

namespace turbomind {
namespace {

struct Planner {
  Planner(int max_batch_size, int max_step_tokens, std::vector<int64_t> num_blocks,
          std::vector<int> windows = {0}, bool prefix_caching = true)
      : cache(device,
              MakeKvCacheConfig(windows, KvCacheMode::kFp4Nv, 1, 64, 16, DataType::kBFloat16),
              std::move(num_blocks)),
        manager(cache, prefix_caching),
        scheduler({max_batch_size, max_step_tokens}, manager, cache.groups()) {}

  Sequence* Add(std::vector<int32_t> prompt) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request = std::make_shared<Request>();
    sequence->request->id = arrivals;
    sequence->arrival = arrivals++;
    sequence->tokens = std::move(prompt);
    sequence->num_prompt = sequence->num_tokens();
    Sequence* raw = sequence.get();
    scheduler.Add(std::move(sequence));
    return raw;
  }

  // Runs one step: each sequence whose tokens are all computed gets the next one. "id:tokens" of
  // the batch in its order, decode first.
  std::string Step() {
    const Batch& batch = scheduler.Plan();
    std::string plan;
    for (Sequence* sequence : batch.sequences) {
      plan += plan.empty() ? "" : " ";
      plan += std::to_string(sequence->arrival);
      plan += ":";
      plan += std::to_string(sequence->num_planned);
    }
    scheduler.StepDone();
    for (Sequence* sequence : batch.sequences) {
      if (sequence->num_missing() == 0) {
        sequence->tokens.push_back(static_cast<int32_t>(sequence->arrival));
      }
    }
    manager.CheckIntegrity(false);
    return plan;
  }

  testing::NullDevice device;
  KvCache cache;
  SequenceManager manager;
  Scheduler scheduler;
  uint64_t arrivals = 0;
};

// Different for each `key`, so that prompts share no prefix.
std::vector<int32_t> Prompt(int key, int length) {
  return std::vector<int32_t>(static_cast<size_t>(length), 1000 + key);
}

TEST_CASE("chunks of a prompt run beside those that decode, decode first") {
  Planner planner(4, 20, {64});
  planner.Add(Prompt(0, 30));
  CHECK(planner.Step() == "0:20");
  CHECK(planner.Step() == "0:10");
  planner.Add(Prompt(1, 25));
  planner.Add(Prompt(2, 3));
  CHECK(planner.Step() == "0:1 1:19");
  CHECK(planner.Step() == "0:1 1:6 2:3");
  CHECK(planner.Step() == "0:1 1:1 2:1");
}

TEST_CASE("no more sequences than max_batch_size or step tokens, in order of arrival") {
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

TEST_CASE("a prompt takes what the prefix cache has") {
  Planner planner(4, 64, {64});
  Sequence* first = planner.Add(Prompt(0, 40));
  CHECK(planner.Step() == "0:40");
  planner.scheduler.Remove(first);
  Sequence* second = planner.Add(Prompt(0, 40));
  CHECK(planner.Step() == "1:8");  // two blocks of 16 found
  CHECK(second->cached_tokens == 32);
  CHECK(planner.scheduler.stats().prefix_hit_tokens == 32);
  Sequence* third = planner.Add(Prompt(0, 40));
  third->request->num_prompt_logprobs = 0;
  CHECK(planner.Step() == "1:1 2:40");
  CHECK(third->cached_tokens == 0);
}

TEST_CASE("the newest is preempted and comes back first, with its tokens as prompt") {
  Planner planner(4, 64, {5}, {0}, false);  // 80 tokens
  planner.Add(Prompt(0, 30));
  Sequence* newest = planner.Add(Prompt(1, 30));
  planner.Add(Prompt(2, 30));
  CHECK(planner.Step() == "0:30 1:30");  // 2 does not fit beside them
  CHECK(planner.Step() == "0:1 1:1");
  CHECK(planner.Step() == "0:1 1:1");
  CHECK(planner.Step() == "0:1");  // a third block for 0; 1 would need a sixth
  CHECK(planner.scheduler.stats().num_preemptions == 1);
  CHECK(newest->num_computed == 0);
  CHECK(newest->num_tokens() == 33);
  CHECK(planner.scheduler.waiting().front().get() == newest);
  planner.scheduler.Remove(planner.scheduler.running().front().get());
  CHECK(planner.Step() == "1:33 2:30");
}

TEST_CASE("a large request is not overtaken by smaller ones behind it") {
  Planner planner(8, 256, {8});
  Sequence* small = planner.Add(Prompt(0, 20));
  planner.Add(Prompt(1, 120));
  planner.Add(Prompt(2, 1));
  CHECK(planner.Step() == "0:20");
  CHECK(planner.Step() == "0:1");
  planner.scheduler.Remove(small);
  CHECK(planner.Step() == "1:120");
}

// Random loads on tiny pools with a window: everything ends, every block comes back.
TEST_CASE("random requests all finish, and the same calls give the same plans") {
  std::string logs[2];
  for (std::string& log : logs) {
    std::mt19937 random(3);
    Planner planner(5, 24, {14, 9}, {0, 20});
    std::vector<std::pair<Sequence*, int64_t>> open;  // and the length at which it ends
    int num_started = 0;
    for (int step = 0; num_started < 300 || !open.empty(); ++step) {
      REQUIRE(step < 20'000);
      if (num_started < 300 && random() % 3 == 0) {
        const auto length = static_cast<int>(1 + random() % 100);
        const auto total = static_cast<int64_t>(length + 1 + random() % 50);
        Sequence* sequence = planner.Add(Prompt(static_cast<int>(random() % 6), length));
        REQUIRE(planner.manager.CanEverFit(total, 24));
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
    for (int group : {0, 1}) {
      CHECK(planner.manager.counts(group).free == planner.manager.counts(group).total);
    }
  }
  CHECK(logs[0] == logs[1]);
}

}  // namespace
}  // namespace turbomind
