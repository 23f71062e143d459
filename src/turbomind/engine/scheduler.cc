// ⑤ Plans steps: continuous batching, chunked prefill mixed with decode, preemption by recompute.

#include "turbomind/engine/scheduler.h"

#include <algorithm>
#include <ranges>
#include <span>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind {

Scheduler::Scheduler(const SchedulerConfig& config, SequenceManager& manager,
                     const std::vector<LayerGroup>& groups)
    : config_(config),
      manager_(manager),
      groups_(groups),
      batch_(static_cast<int>(groups.size())),
      promised_(static_cast<size_t>(manager.num_pools())) {
  Check(config_.max_batch_size > 0 && config_.max_step_tokens > 0,
        "max_batch_size and max_step_tokens must be positive");
}

void Scheduler::Add(std::unique_ptr<Sequence> sequence) {
  Check(waiting_.empty() || waiting_.back()->arrival < sequence->arrival,
        "sequences must be added in order of arrival");
  waiting_.push_back(std::move(sequence));
}

const Batch& Scheduler::Plan() {
  batch_.Clear();
  for (auto& sequence : running_) {
    sequence->num_planned = 0;
  }
  int64_t budget = config_.max_step_tokens;
  const int64_t preemptions_before = stats_.num_preemptions;
  for (const bool decode : {true, false}) {
    // Uses indices, because planning a sequence may preempt the newest ones at the end of the
    // queue.
    for (size_t i = 0; i < running_.size(); ++i) {
      Sequence& sequence = *running_[i];
      if ((sequence.num_missing() == 1) == decode) {
        budget -= PlanRunning(sequence, budget);
      }
    }
  }
  if (stats_.num_preemptions == preemptions_before) {
    budget -= Admit(budget);
  }
  Build();
  Check(!batch_.empty() || (waiting_.empty() && running_.empty()),
        "at least one sequence must be able to run");
  return batch_;
}

int64_t Scheduler::PlanRunning(Sequence& sequence, int64_t budget) {
  const int64_t wanted = std::min(budget, sequence.num_missing());
  if (wanted <= 0) {
    return 0;
  }
  const uint64_t id = sequence.request->id;
  while (!manager_.AllocateDataAndScaleBlocks(id, sequence.num_computed + wanted)) {
    const bool is_newest = running_.back().get() == &sequence;
    PreemptNewest();
    if (is_newest) {
      return 0;
    }
  }
  sequence.num_planned = wanted;
  return wanted;
}

void Scheduler::PreemptNewest() {
  std::unique_ptr<Sequence> sequence = std::move(running_.back());
  running_.pop_back();
  manager_.FreeDataAndScaleBlocks(sequence->request->id);
  sequence->num_computed = 0;
  sequence->num_planned = 0;
  waiting_.push_front(std::move(sequence));
  ++stats_.num_preemptions;
}

// Starts waiting sequences while there is room. Returns the number of tokens planned for them.
int64_t Scheduler::Admit(int64_t budget) {
  const int max_value = std::min(config_.max_batch_size, config_.max_step_tokens);
  int64_t used = 0;
  while (!waiting_.empty() && used < budget && static_cast<int>(running_.size()) < max_value) {
    Sequence& sequence = *waiting_.front();
    const uint64_t id = sequence.request->id;
    CountPromised();
    sequence.num_computed = manager_.Create(id, sequence.tokens, sequence.may_use_prefix_cache());
    const int64_t wanted = std::min(budget - used, sequence.num_missing());
    if (AwaitsPrefix(sequence) || !Fits(sequence) ||
        !manager_.AllocateDataAndScaleBlocks(id, sequence.num_computed + wanted)) {
      manager_.FreeDataAndScaleBlocks(id);
      sequence.num_computed = 0;
      return used;
    }
    if (!sequence.was_admitted) {
      sequence.was_admitted = true;
      stats_.prompt_tokens += sequence.num_prompt;
      sequence.cached_tokens = static_cast<int>(sequence.num_computed);
      stats_.prefix_queried_tokens += UsesPrefixCache(sequence) ? sequence.num_prompt : 0;
      stats_.prefix_hit_tokens += sequence.num_computed;
      stats_.prefix_cut_tokens += manager_.num_cut(id);
    }
    sequence.num_planned = wanted;
    used += wanted;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  return used;
}

// Returns the blocks that a sequence will still need until all its tokens are computed.
int64_t Scheduler::BlocksToCome(const Sequence& sequence, int pool) const {
  return manager_.BlocksToCome(sequence.request->id, pool, sequence.num_tokens(),
                               config_.max_step_tokens);
}

// Computes, by pool, the blocks that running sequences will still need for their prompts. A step's
// chunk is not added per sequence in 16-bit pools: while the step has room for another sequence, it
// contains all tokens of the running ones, and these have their slots.
void Scheduler::CountPromised() {
  std::fill(promised_.begin(), promised_.end(), 0);
  for (const auto& sequence : running_) {
    for (size_t pool = 0; pool < promised_.size(); ++pool) {
      promised_[pool] += BlocksToCome(*sequence, static_cast<int>(pool));
    }
  }
}

bool Scheduler::UsesPrefixCache(const Sequence& sequence) const {
  return manager_.enable_prefix_caching() && sequence.may_use_prefix_cache();
}

// Returns whether a sequence fits. It always fits alone, because Submit checked it.
bool Scheduler::Fits(const Sequence& sequence) const {
  if (running_.empty()) {
    return true;
  }
  for (size_t pool = 0; pool < promised_.size(); ++pool) {
    const BlockCounts counts = manager_.counts(static_cast<int>(pool));
    const int64_t needed = BlocksToCome(sequence, static_cast<int>(pool)) + promised_[pool];
    if (needed > counts.free + counts.cached) {
      return false;
    }
  }
  return true;
}

// Returns whether a created sequence should wait for the prefix cache. It waits for whole blocks
// that it shares with a running sequence and that this step computes. If they turn out to be
// unusable, it does not wait again.
bool Scheduler::AwaitsPrefix(const Sequence& sequence) const {
  if (!UsesPrefixCache(sequence)) {
    return false;
  }
  const int64_t length = manager_.block_seq_len();
  const auto whole = [length](int64_t num_tokens) { return num_tokens / length * length; };
  const int64_t min_value = sequence.num_computed + CeilDiv(sequence.num_missing(), int64_t{2});
  const auto brings = [&](const auto& other) {
    // The last token of a prompt is always computed.
    const int64_t end =
        std::min(sequence.num_tokens() - 1, other->num_computed + other->num_planned);
    if (whole(end) < min_value || whole(end) <= whole(other->num_computed)) {
      return false;
    }
    const auto tokens = std::span(sequence.tokens).first(static_cast<size_t>(end));
    const auto differ = std::ranges::mismatch(tokens, other->tokens).in1;
    const int64_t shared = whole(differ - tokens.begin());
    return shared >= min_value && shared > whole(other->num_computed);
  };
  const auto beginning = std::span(sequence.tokens).first(static_cast<size_t>(min_value));
  const auto is_alike = [&](const auto& other) {
    return std::ranges::mismatch(beginning, other->tokens).in1 == beginning.end();
  };
  return std::ranges::any_of(running_, brings) &&
         std::ranges::all_of(waiting_ | std::views::take(config_.max_batch_size), is_alike);
}

void Scheduler::Build() {
  for (const bool decode : {true, false}) {
    for (auto& sequence : running_) {
      if (sequence->num_planned > 0 && (sequence->num_planned == 1) == decode) {
        batch_.Add(*sequence);
      }
    }
  }
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    BuildTables(group);
  }
  batch_.Finish();
}

// Relies on equal table lengths in both pools of a group.
void Scheduler::BuildTables(int group) {
  const int num_groups = static_cast<int>(groups_.size());
  const bool has_window16 = groups_[static_cast<size_t>(group)].rule.enabled();
  size_t stride = 0;
  for (const Sequence* sequence : batch_.sequences) {
    stride = std::max(stride, manager_.BlockTable(sequence->request->id, group).size());
  }
  Batch::BlockTables& tables =
      batch_.ResetTables(static_cast<size_t>(group), static_cast<int64_t>(stride), has_window16);
  for (size_t row = 0; row < batch_.sequences.size(); ++row) {
    const uint64_t id = batch_.sequences[row]->request->id;
    tables.SetRow(
        row, manager_.BlockTable(id, group),
        has_window16 ? manager_.BlockTable(id, num_groups + group) : std::span<const int32_t>());
    const std::span<const PendingQuantization> own = manager_.BlocksToQuantize(id, group);
    tables.blocks_to_quantize.insert(tables.blocks_to_quantize.end(), own.begin(), own.end());
  }
}

void Scheduler::StepDone() {
  for (Sequence* sequence : batch_.sequences) {
    sequence->num_computed += sequence->num_planned;
    manager_.Commit(sequence->request->id,
                    std::span(sequence->tokens).first(static_cast<size_t>(sequence->num_computed)));
  }
}

std::unique_ptr<Sequence> Scheduler::Remove(const Sequence* sequence) {
  const auto is_it = [sequence](const auto& entry) { return entry.get() == sequence; };
  for (auto* queue : {&running_, &waiting_}) {
    const auto found = std::find_if(queue->begin(), queue->end(), is_it);
    if (found == queue->end()) {
      continue;
    }
    std::unique_ptr<Sequence> taken = std::move(*found);
    queue->erase(found);
    if (queue == &running_) {
      manager_.FreeDataAndScaleBlocks(taken->request->id);
    }
    return taken;
  }
  throw InternalError("the sequence is neither waiting nor running");
}

void Scheduler::Abandon() {
  batch_.Clear();
  running_.clear();
  waiting_.clear();
}

}  // namespace turbomind
