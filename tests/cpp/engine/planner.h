#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/null_device.h"
#include "turbomind/engine/scheduler.h"

namespace turbomind::testing {

// Steps cost so much that only max_step_tokens limits the tokens of prompts.
inline constexpr StepCost kTokensOnly = {.step = int64_t{1} << 40, .token = 1};

// A scheduler whose plans run without computing anything. Tokens come from a rule.
struct Planner {
  Planner(int max_batch_size, int max_step_tokens, std::vector<int64_t> num_blocks,
          std::vector<int> windows = {0}, bool prefix_caching = true,
          PrecisionWindowTokens window16 = {})
      : Planner({max_batch_size, max_step_tokens, kTokensOnly}, std::move(num_blocks),
                std::move(windows), prefix_caching, window16) {}

  Planner(const SchedulerConfig& config, std::vector<int64_t> num_blocks,
          std::vector<int> windows = {0}, bool prefix_caching = true,
          PrecisionWindowTokens window16 = {})
      : Planner(config, Config(windows, window16), std::move(num_blocks), prefix_caching) {}

  Planner(const SchedulerConfig& config, const KvCacheConfig& cache_config,
          std::vector<int64_t> num_blocks, bool prefix_caching = true)
      : cache(device, cache_config, std::move(num_blocks)),
        manager(cache, prefix_caching),
        scheduler(config, manager, cache.groups()) {}

  static KvCacheConfig Config(const std::vector<int>& windows, PrecisionWindowTokens window16) {
    KvCacheConfig config =
        MakeKvCacheConfig(windows, KvCacheMode::kFp4Nv, 1, 64, 16, DataType::kBFloat16);
    config.window16 = window16;
    return config;
  }

  Sequence* Add(std::vector<int32_t> prompt, int priority = 0) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request = std::make_shared<Request>();
    sequence->request->id = arrivals;
    sequence->request->priority = priority;
    sequence->arrival = arrivals++;
    sequence->tokens = std::move(prompt);
    sequence->num_prompt = sequence->num_tokens();
    Sequence* raw = sequence.get();
    scheduler.Add(std::move(sequence));
    return raw;
  }

  // Runs one step. Each sequence whose tokens are all computed gets its next token. Returns the
  // plan as "id:tokens" in the order of the batch, decode first.
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

  NullDevice device;
  KvCache cache;
  SequenceManager manager;
  Scheduler scheduler;
  uint64_t arrivals = 0;
};

// Returns a prompt of equal tokens. Prompts with different keys share no prefix.
inline std::vector<int32_t> Prompt(int key, int length) {
  return std::vector<int32_t>(static_cast<size_t>(length), 1000 + key);
}

}  // namespace turbomind::testing
