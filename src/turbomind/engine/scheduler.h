#pragma once

// ⑤ Plans steps: which sequences run, how many tokens each, who waits, who is preempted.

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "turbomind/engine/batch.h"
#include "turbomind/engine/sequence.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {

struct SchedulerConfig {
  int max_batch_size = 0;
  int max_step_tokens = 0;  // max_prefill_token_num
};

struct SchedulerStats {
  int64_t prompt_tokens = 0;  // of admitted sequences, cached ones included
  int64_t prefix_queried_tokens = 0;
  int64_t prefix_hit_tokens = 0;
  int64_t prefix_cut_tokens = 0;  // SequenceManager::num_cut
  int64_t num_preemptions = 0;
};

// The planner. It touches block ids and tokens alone, never a device: the same calls give the same
// plans, so that a test can replay them.
//
// Each step, within max_step_tokens new tokens:
//   1. sequences that decode, oldest first;
//   2. sequences in the middle of their prompt, oldest first, each as large a chunk as is left;
//   3. waiting ones, oldest first, while their whole prompt fits beside what is promised to those
//      that run, in every pool. None overtakes another, so none starves. One that would compute
//      twice what this step computes anyway (the n answers of a prompt, questions on one text)
//      waits for the prefix cache to have it, where that is at least half of its work and those
//      behind it begin alike: they wait with it.
// Where no block is free for a sequence that runs, the newest running one is preempted: its blocks
// are freed and it waits at its old place, to be computed again (cached blocks permitting).
//
// A step is planned when the one before it has ended. Counted by step_guard (benchmarks/cpp), Plan
// and StepDone take 1,300 instructions for one decoding sequence and 28,000 for 32: some 10 us, a
// thousandth of a step on CPU, where a thread that plans meanwhile would take a core from the ops.
// A device that runs a step on its own could be planned for ahead: of a step's result, Plan needs
// only which sequences have ended; Batch::Add is where chosen tokens enter.
//
// Invariants:
//  1. Every running sequence is older than every waiting one (by `arrival`).
//  2. At most min(max_batch_size, max_step_tokens) run, so that each of them advances each step.
//  3. While anything waits or runs, Plan() returns a batch that is not empty. This holds because
//     requests that could not run alone are refused before (MemoryPlan::max_sequence_tokens).
// Engine thread only.
class Scheduler {
 public:
  Scheduler(const SchedulerConfig& config, SequenceManager& manager,
            const std::vector<LayerGroup>& groups);

  void Add(std::unique_ptr<Sequence> sequence);
  // The next step; valid until the next call. Empty when there is nothing to do.
  const Batch& Plan();
  // The planned step has run: its K and V are written. Committed blocks enter the prefix cache.
  void StepDone();
  // Takes a sequence out, in whatever state, and frees its blocks.
  std::unique_ptr<Sequence> Remove(const Sequence* sequence);
  // Forgets all sequences and leaves their blocks as they are: nothing will run again.
  void Abandon();

  const std::deque<std::unique_ptr<Sequence>>& waiting() const { return waiting_; }
  const std::deque<std::unique_ptr<Sequence>>& running() const { return running_; }
  const SchedulerStats& stats() const { return stats_; }

 private:
  // Plans up to `budget` tokens of a running sequence; returns how many.
  int64_t PlanRunning(Sequence& sequence, int64_t budget);
  void PreemptNewest();
  int64_t Admit(int64_t budget);
  bool UsesPrefixCache(const Sequence& sequence) const;
  bool Fits(const Sequence& sequence) const;
  bool AwaitsPrefix(const Sequence& sequence) const;
  void CountPromised();
  int64_t BlocksToCome(const Sequence& sequence, int pool) const;
  void Build();
  void BuildTables(int group);

  SchedulerConfig config_;
  SequenceManager& manager_;
  const std::vector<LayerGroup>& groups_;
  std::deque<std::unique_ptr<Sequence>> waiting_;  // by arrival
  std::deque<std::unique_ptr<Sequence>> running_;  // by arrival
  Batch batch_;
  std::vector<int64_t> promised_;  // by pool, of one admission
  SchedulerStats stats_;
};

}  // namespace turbomind
