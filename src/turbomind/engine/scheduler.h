#pragma once

// ⑤ Plans steps: which sequences run with how many tokens, which wait and which are preempted.

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
  int64_t prompt_tokens = 0;  // of admitted sequences, cached tokens included
  int64_t prefix_queried_tokens = 0;
  int64_t prefix_hit_tokens = 0;
  int64_t prefix_cut_tokens = 0;  // SequenceManager::num_cut
  int64_t num_preemptions = 0;
};

// Plans the steps. It works on block ids and tokens and never uses a device. The same calls give
// the same plans, so a test can replay them.
//
// Each step plans, within max_step_tokens new tokens:
//   1. sequences that decode, oldest first;
//   2. sequences in the middle of their prompt, oldest first, each with the largest chunk left;
//   3. waiting sequences, oldest first. A sequence starts if its whole prompt fits into every pool,
//      in addition to the blocks promised to running sequences. No sequence overtakes another, so
//      none starves. A sequence may wait for the prefix cache if this step computes at least half
//      of its work anyway (n choices of one prompt, questions about one text). It waits only if
//      the sequences after it start with the same tokens, because they wait with it.
// If no block is free for a running sequence, the newest running sequence is preempted. Its blocks
// are freed and it returns to its place in the queue. It is computed again, except for tokens that
// are still cached.
//
// A step is planned after the previous one has ended. step_guard (benchmarks/cpp) counts 1,300
// instructions for Plan and StepDone with one decoding sequence, and 28,000 with 32. That is about
// 10 us, a thousandth of a step on a CPU. A thread that plans ahead would take a core from the ops.
// For a device that runs steps asynchronously, planning ahead is possible: Plan only needs to know
// which sequences have ended. Sampled tokens enter in Batch::Add.
//
// Invariants:
//  1. Every running sequence is older than every waiting one (by `arrival`).
//  2. At most min(max_batch_size, max_step_tokens) sequences run, so each of them can advance in
//     each step.
//  3. While anything waits or runs, Plan() returns a batch that is not empty. This holds because
//     requests that could not run alone are rejected before (MemoryPlan::max_sequence_tokens).
// Only the engine thread may use it.
class Scheduler {
 public:
  Scheduler(const SchedulerConfig& config, SequenceManager& manager,
            const std::vector<LayerGroup>& groups);

  void Add(std::unique_ptr<Sequence> sequence);
  // Plans the next step. The batch is valid until the next call and empty if there is nothing to
  // do.
  const Batch& Plan();
  // Records that the planned step has run and its K and V are written. Committed blocks enter the
  // prefix cache.
  void StepDone();
  // Removes a sequence in any state and frees its blocks.
  std::unique_ptr<Sequence> Remove(const Sequence* sequence);
  // Drops all sequences without freeing their blocks. Nothing may run afterwards.
  void Abandon();

  const std::deque<std::unique_ptr<Sequence>>& waiting() const { return waiting_; }
  const std::deque<std::unique_ptr<Sequence>>& running() const { return running_; }
  const SchedulerStats& stats() const { return stats_; }

 private:
  // Plans up to `budget` tokens of a running sequence. Returns the number planned.
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
  std::vector<int64_t> promised_;  // by pool, for one admission
  SchedulerStats stats_;
};

}  // namespace turbomind
