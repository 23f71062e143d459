#pragma once

// ⑤ Plans steps: which sequences run with how many tokens, which wait and which are preempted.

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "turbomind/engine/batch.h"
#include "turbomind/engine/sequence.h"
#include "turbomind/engine/step_cost.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {

struct SchedulerConfig {
  int max_batch_size = 0;
  int max_step_tokens = 0;  // max_prefill_token_num
  StepCost cost;
  int64_t max_sequence_len = 0;  // drafts end before it
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
// Sequences are served in the order of their priority (lower first), then of their arrival. Each
// step does the following, within max_step_tokens new tokens:
//   1. It plans one token of every sequence that decodes. Then it adds drafts as far as blocks are
//      left, each as long as its expected gain exceeds its cost: a right token saves the sequence's
//      share of a step.
//   2. It starts waiting sequences. A sequence starts if its whole prompt fits into every pool, in
//      addition to the blocks promised to running sequences. While the next sequence does not fit,
//      no other overtakes it. A sequence may wait for the prefix cache if a running one computes at
//      least half of its work anyway (n choices of one prompt, questions about one text). It waits
//      only if the sequences after it start with the same tokens, because they wait with it.
//   3. It shares the budget below among the prompts: lower priority values first, then the prompts
//      with the fewest tokens left.
// If no block is free for a running sequence, the last running sequence in the order of service is
// preempted, but never the oldest one. Its blocks are freed and it returns to its place in the
// queue. It is computed again, except for tokens that are still cached.
//
// The budget of prompts is an estimated cost (StepCost):
//   * While n sequences decode and m prompts are read, it is 15/16 of the cost of the step without
//     prompts, times m / n if m > n. So a step takes less than twice as long as without prompts,
//     unless more prompts are read than responses are written.
//   * Otherwise it is the cost of four full steps at the beginning of a prompt. In a step that ends
//     prompts, the others get at most the cost of the step and of those prompts.
// A chunk has at least kMinChunk tokens, or all that are left. The first one may exceed the budget,
// because smaller chunks are inefficient: each one reads all K and V of its prompt. At a context of
// 32,768 tokens, four tokens can cost three times as much as the step without them.
//
// A step is planned after the previous one has ended. step_guard (benchmarks/cpp) counts 1,300
// instructions for Plan and StepDone with one decoding sequence, and 28,000 with 32. That is about
// 10 us, a thousandth of a step on a CPU. A thread that plans ahead would take a core from the ops.
// For a device that runs steps asynchronously, planning ahead is possible: Plan only needs to know
// which sequences have ended. Sampled tokens enter in Batch::Add.
//
// Invariants:
//  1. At most min(max_batch_size, max_step_tokens) sequences run, so each of them can advance in
//     each step. Every decoding sequence does.
//  2. While anything waits or runs, Plan() returns a batch that is not empty. This holds because
//     requests that could not run alone are rejected before (MemoryPlan::max_sequence_tokens).
//  3. While sequences decode, the prompts of a step cost at most the budget, or are one chunk of
//     kMinChunk tokens.
//  4. No sequence starves, whatever arrives. The oldest running sequence is never preempted. The
//     oldest running prompt gets at least 1 / kAgingSteps of the budget, and it advances in one of
//     any kAgingSteps consecutive steps. The oldest waiting sequence is the next to start after
//     kAgingSteps - 1 others.
// Only the engine thread may use it.
class Scheduler {
 public:
  static constexpr int kAgingSteps = 4;
  static constexpr int64_t kMinChunk = 4;

  Scheduler(const SchedulerConfig& config, SequenceManager& manager,
            const std::vector<LayerGroup>& groups);

  void Add(std::unique_ptr<Sequence> sequence);
  // Plans the next step. The batch is valid until the next call and empty if there is nothing to
  // do.
  const Batch& Plan();
  // Records that the planned step has run: its K and V are written, and tokens after them, if any,
  // were chosen. Committed blocks enter the prefix cache.
  void StepDone();
  // Removes a sequence in any state and frees its blocks.
  std::unique_ptr<Sequence> Remove(const Sequence* sequence);
  // Drops all sequences without freeing their blocks. Nothing may run afterwards.
  void Abandon();

  const std::deque<std::unique_ptr<Sequence>>& waiting() const { return waiting_; }
  const std::deque<std::unique_ptr<Sequence>>& running() const { return running_; }
  const SchedulerStats& stats() const { return stats_; }

 private:
  using Queue = std::deque<std::unique_ptr<Sequence>>;

  // Plans `num_tokens` of a running sequence, for which it may preempt others. Returns false if the
  // sequence itself is preempted.
  bool PlanTokens(Sequence& sequence, int64_t num_tokens);
  // Preempts a sequence and returns it.
  const Sequence* Preempt();
  // Plans the sequences that decode. Returns what the step costs with them.
  int64_t PlanDecode();
  // Adds drafts to the planned sequences of order_. Returns what they cost.
  int64_t PlanDrafts(int64_t decode_cost);
  int64_t DraftCost(const Sequence& sequence, int64_t length) const;
  int64_t NumToStart() const;
  int64_t DraftLength(const Sequence& sequence, int64_t decode_cost) const;
  void PlanPrompts(int64_t decode_cost);
  // Sorts the running sequences that do not decode into order_, next first. Returns the oldest.
  Sequence* SortPrompts();
  int64_t PromptBudget(int64_t decode_cost) const;
  void Admit();
  Queue::iterator NextToAdmit();
  bool UsesPrefixCache(const Sequence& sequence) const;
  bool Fits(const Sequence& sequence) const;
  bool AwaitsPrefix(const Sequence& sequence);
  void CountPromised();
  int64_t BlocksToCome(const Sequence& sequence, int pool, int64_t chunk) const;
  void Build();

  SchedulerConfig config_;
  SequenceManager& manager_;
  const std::vector<LayerGroup>& groups_;
  Queue waiting_;  // in the order of service
  Queue running_;  // in the order of service
  Batch batch_;
  std::vector<int64_t> promised_;  // by pool, for one admission
  SchedulerStats stats_;

  // Of the current step.
  std::vector<Sequence*> order_;  // sequences to plan, null if preempted
  int64_t tokens_left_ = 0;
  int num_decode_ = 0;

  uint64_t next_arrival_ = 0;
  int num_overtakes_ = 0;  // admissions since the oldest waiting sequence was overtaken
};

}  // namespace turbomind
