// ⑤ Plans steps: continuous batching, chunked prefill mixed with decode, preemption by recompute.

#include "turbomind/engine/scheduler.h"

#include <algorithm>
#include <ranges>
#include <span>
#include <tuple>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// The prompts' part of a step is 15/16 of what the step costs without them. The rest is left for
// errors of the estimate.
constexpr int64_t kPromptSixteenths = 15;
constexpr int64_t kFullSteps = 4;
// A few rows at a time take longer than those of a prompt. Steps of SmolLM2 with drafts of 1, 2, 4
// and 8 tokens took 1.4, 1.8, 2.7 and 4.1 times as long as those without drafts (AVX2,
// benchmarks/NOTES.md).
constexpr int64_t kFewRowsSixteenths = 24;
constexpr int64_t kDraftSixteenths = 8;
constexpr int64_t kWholeBudget = 1 << 10;  // the unit of Sequence::share_owed

uint64_t ArrivalOf(const std::unique_ptr<Sequence>& sequence) { return sequence->arrival; }

std::pair<int, uint64_t> OrderOf(const std::unique_ptr<Sequence>& sequence) {
  return {sequence->request->priority, sequence->arrival};
}

// Inserts a sequence into a queue in the order of service.
void Insert(std::deque<std::unique_ptr<Sequence>>& queue, std::unique_ptr<Sequence> sequence) {
  const auto place = std::ranges::upper_bound(queue, OrderOf(sequence), {}, &OrderOf);
  queue.insert(place, std::move(sequence));
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, SequenceManager& manager,
                     const std::vector<LayerGroup>& groups)
    : config_(config),
      manager_(manager),
      groups_(groups),
      batch_(static_cast<int>(groups.size())),
      promised_(static_cast<size_t>(manager.num_pools())) {
  Check(config_.max_batch_size > 0 && config_.max_step_tokens > 0,
        "max_batch_size and max_step_tokens must be positive");
  order_.reserve(static_cast<size_t>(config_.max_batch_size));
}

void Scheduler::Add(std::unique_ptr<Sequence> sequence) {
  Check(next_arrival_ <= sequence->arrival, "sequences must be added in order of arrival");
  next_arrival_ = sequence->arrival + 1;
  Insert(waiting_, std::move(sequence));
}

const Batch& Scheduler::Plan() {
  batch_.Clear();
  for (auto& sequence : running_) {
    sequence->num_planned = 0;
    sequence->draft.clear();
  }
  tokens_left_ = config_.max_step_tokens;
  const int64_t preemptions_before = stats_.num_preemptions;
  const int64_t decode_cost = PlanDecode();
  if (stats_.num_preemptions == preemptions_before) {
    Admit();
  }
  PlanPrompts(decode_cost);
  Build();
  Check(!batch_.empty() || (waiting_.empty() && running_.empty()),
        "at least one sequence must be able to run");
  return batch_;
}

int64_t Scheduler::PlanDecode() {
  order_.clear();
  for (const auto& sequence : running_) {
    if (sequence->num_missing() == 1) {
      order_.push_back(sequence.get());
    }
  }
  int64_t cost = config_.cost.step;
  num_decode_ = 0;
  for (size_t i = 0; i < order_.size(); ++i) {  // PlanTokens changes entries
    Sequence* sequence = order_[i];
    if (sequence != nullptr && PlanTokens(*sequence, 1)) {
      const int64_t computed = sequence->num_computed;
      cost += config_.cost.Chunk(groups_, computed, computed + 1) + config_.cost.logits;
      ++num_decode_;
    }
  }
  return cost + PlanDrafts(cost);
}

int64_t Scheduler::PlanDrafts(int64_t decode_cost) {
  int64_t cost = 0;
  for (Sequence* sequence : order_) {
    if (sequence == nullptr || sequence->drafter == nullptr) {
      continue;
    }
    sequence->drafter->Update(sequence->tokens);
    const int64_t length = DraftLength(*sequence, decode_cost);
    const int64_t end = sequence->num_tokens() + length;
    if (length == 0 || !manager_.AllocateDataAndScaleBlocks(sequence->request->id, end, length)) {
      continue;
    }
    const auto draft = sequence->drafter->candidate().first(static_cast<size_t>(length));
    sequence->draft.assign(draft.begin(), draft.end());
    sequence->num_planned += length;
    tokens_left_ -= length;
    cost += DraftCost(*sequence, length);
  }
  return cost;
}

// Returns what a draft adds to the cost of a step.
int64_t Scheduler::DraftCost(const Sequence& sequence, int64_t length) const {
  const int64_t begin = sequence.num_computed;
  const int64_t as_prompt = config_.cost.Chunk(groups_, begin, begin + 1 + length) -
                            config_.cost.Chunk(groups_, begin, begin + 1) +
                            length * config_.cost.logits;
  return (as_prompt * kFewRowsSixteenths + config_.cost.token * kDraftSixteenths) / 16;
}

// Returns the most sequences that this step may admit, for which a draft leaves working states.
int64_t Scheduler::NumToStart() const {
  const auto room =
      static_cast<int64_t>(config_.max_batch_size) - static_cast<int64_t>(running_.size());
  return std::clamp<int64_t>(room, 0, static_cast<int64_t>(waiting_.size()));
}

// Returns the length with the highest expected gain.
int64_t Scheduler::DraftLength(const Sequence& sequence, int64_t decode_cost) const {
  const Drafter& drafter = *sequence.drafter;
  const int64_t to_come = sequence.request->max_new_tokens - sequence.num_generated();
  // A draft leaves tokens to the prompts of the step, and to a last token after it.
  const int64_t longest =
      std::min({static_cast<int64_t>(drafter.candidate().size()), to_come - 1,
                config_.max_sequence_len - sequence.num_tokens() - 1, tokens_left_ / 2,
                manager_.MaxUncertain(sequence.request->id) - NumToStart()});
  const double share = static_cast<double>(decode_cost) / num_decode_;
  double probability = 1.;
  double gain = 0.;
  double best = 0.;
  int64_t length = 0;
  for (int64_t n = 1; n <= longest; ++n) {
    probability *= drafter.acceptance();
    gain += probability * share;
    const double net = gain - static_cast<double>(DraftCost(sequence, n));
    if (net > best) {
      best = net;
      length = n;
    }
  }
  return length;
}

Sequence* Scheduler::SortPrompts() {
  order_.clear();
  Sequence* oldest = nullptr;
  for (const auto& sequence : running_) {
    if (sequence->num_planned == 0) {
      order_.push_back(sequence.get());
      if (oldest == nullptr || sequence->arrival < oldest->arrival) {
        oldest = sequence.get();
      }
    }
  }
  const auto key = [](const Sequence* sequence) {
    return std::tuple(sequence->request->priority, sequence->num_missing(), sequence->arrival);
  };
  std::ranges::sort(order_, {}, key);
  return oldest;
}

int64_t Scheduler::PromptBudget(int64_t decode_cost) const {
  if (num_decode_ == 0) {
    return kFullSteps * (config_.cost.step + config_.max_step_tokens * config_.cost.token);
  }
  const auto num_prompts = static_cast<int64_t>(order_.size());
  const int64_t share = decode_cost * kPromptSixteenths / 16;
  return std::max<int64_t>(share * std::max<int64_t>(num_prompts, num_decode_) / num_decode_, 1);
}

void Scheduler::PlanPrompts(int64_t decode_cost) {
  Sequence* oldest = SortPrompts();
  if (oldest == nullptr) {
    return;
  }
  const int64_t budget = PromptBudget(decode_cost);
  oldest->share_owed = std::min(oldest->share_owed + kWholeBudget / kAgingSteps, kWholeBudget);
  if (oldest->share_owed == kWholeBudget) {
    const auto found = std::ranges::find(order_, oldest);
    std::rotate(order_.begin(), found, found + 1);
  }
  int64_t spent = 0;
  int64_t ended = 0;  // the part of prompts that end in this step
  for (size_t i = 0; i < order_.size() && tokens_left_ > 0; ++i) {
    Sequence* sequence = order_[i];
    if (sequence == nullptr) {
      continue;  // preempted by PlanTokens
    }
    const int64_t begin = sequence->num_computed;
    const int64_t max_tokens = std::min(sequence->num_missing(), tokens_left_);
    const int64_t min_tokens = std::min(kMinChunk, max_tokens);
    int64_t num_tokens = config_.cost.TokensFor(groups_, begin, max_tokens, budget - spent);
    const bool ends = num_tokens == sequence->num_missing();
    if (!ends && num_decode_ == 0 && ended > 0) {
      const int64_t rest = std::min(budget, ended + config_.cost.step + ended) - spent;
      num_tokens = config_.cost.TokensFor(groups_, begin, max_tokens, rest);
    }
    if (num_tokens < min_tokens && spent > 0) {
      continue;
    }
    num_tokens = std::max(num_tokens, min_tokens);
    if (!PlanTokens(*sequence, num_tokens)) {
      continue;
    }
    const int64_t cost = config_.cost.Chunk(groups_, begin, begin + num_tokens);
    spent += cost;
    ended += ends ? cost : 0;
    sequence->share_owed =
        std::max<int64_t>(sequence->share_owed - cost * kWholeBudget / budget, 0);
  }
}

bool Scheduler::PlanTokens(Sequence& sequence, int64_t num_tokens) {
  const uint64_t id = sequence.request->id;
  while (!manager_.AllocateDataAndScaleBlocks(id, sequence.num_computed + num_tokens)) {
    if (Preempt() == &sequence) {
      return false;
    }
  }
  sequence.num_planned = num_tokens;
  tokens_left_ -= num_tokens;
  return true;
}

const Sequence* Scheduler::Preempt() {
  Check(running_.size() > 1, "a sequence must be able to run alone");
  const auto oldest = std::ranges::min_element(running_, {}, &ArrivalOf);
  const auto victim = std::prev(running_.end(), oldest == std::prev(running_.end()) ? 2 : 1);
  std::unique_ptr<Sequence> sequence = std::move(*victim);
  running_.erase(victim);
  manager_.FreeDataAndScaleBlocks(sequence->request->id);
  if (sequence->num_planned > 0 && sequence->num_missing() == 1) {
    --num_decode_;
  }
  sequence->num_computed = 0;
  sequence->num_planned = 0;
  sequence->draft.clear();
  Sequence* preempted = sequence.get();
  std::ranges::replace(order_, preempted, nullptr);
  Insert(waiting_, std::move(sequence));
  ++stats_.num_preemptions;
  return preempted;
}

Scheduler::Queue::iterator Scheduler::NextToAdmit() {
  return num_overtakes_ + 1 < kAgingSteps ? waiting_.begin()
                                          : std::ranges::min_element(waiting_, {}, &ArrivalOf);
}

// Starts waiting sequences while there is room. PlanPrompts plans their tokens.
void Scheduler::Admit() {
  const auto max_running =
      static_cast<size_t>(std::min(config_.max_batch_size, config_.max_step_tokens));
  while (!waiting_.empty() && running_.size() < max_running) {
    const auto next = NextToAdmit();
    Sequence& sequence = **next;
    const uint64_t id = sequence.request->id;
    CountPromised();
    sequence.num_computed = manager_.Create(id, sequence.tokens, sequence.may_use_prefix_cache(),
                                            sequence.request->cache_salt);
    if (AwaitsPrefix(sequence) || !Fits(sequence)) {
      manager_.FreeDataAndScaleBlocks(id);
      sequence.num_computed = 0;
      return;
    }
    if (!sequence.was_admitted) {
      sequence.was_admitted = true;
      stats_.prompt_tokens += sequence.num_prompt;
      sequence.cached_tokens = static_cast<int>(sequence.num_computed);
      stats_.prefix_queried_tokens += UsesPrefixCache(sequence) ? sequence.num_prompt : 0;
      stats_.prefix_hit_tokens += sequence.num_computed;
      stats_.prefix_cut_tokens += manager_.num_cut(id);
    }
    const bool overtakes = std::ranges::any_of(
        waiting_, [&](const auto& other) { return other->arrival < sequence.arrival; });
    num_overtakes_ = overtakes ? num_overtakes_ + 1 : 0;
    std::unique_ptr<Sequence> admitted = std::move(*next);
    waiting_.erase(next);
    Insert(running_, std::move(admitted));
  }
}

// Returns the blocks that a sequence will still need until all its tokens are computed.
int64_t Scheduler::BlocksToCome(const Sequence& sequence, int pool, int64_t chunk) const {
  return manager_.BlocksToCome(sequence.request->id, pool, sequence.num_tokens(), chunk);
}

// Computes, by pool, the blocks that running sequences will still need for their prompts. All
// sequences share the tokens of a step, so only the sequence to be admitted (Fits) counts with the
// largest chunk.
void Scheduler::CountPromised() {
  std::fill(promised_.begin(), promised_.end(), 0);
  for (const auto& sequence : running_) {
    for (size_t pool = 0; pool < promised_.size(); ++pool) {
      promised_[pool] += BlocksToCome(*sequence, static_cast<int>(pool), 1);
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
    const int64_t needed =
        BlocksToCome(sequence, static_cast<int>(pool), config_.max_step_tokens) + promised_[pool];
    if (needed > counts.free + counts.cached) {
      return false;
    }
  }
  return true;
}

// Returns whether a created sequence should wait for the prefix cache. It waits for whole blocks
// that it shares with a running sequence and that are still to be computed. The running sequence
// leaves a checkpoint after them. If they turn out to be unusable, it does not wait again.
bool Scheduler::AwaitsPrefix(const Sequence& sequence) {
  if (!UsesPrefixCache(sequence)) {
    return false;
  }
  const int64_t length = manager_.block_seq_len();
  const auto whole = [length](int64_t num_tokens) { return num_tokens / length * length; };
  const int64_t min_shared = sequence.num_computed + CeilDiv(sequence.num_missing(), int64_t{2});
  const auto shares = [&](const auto& other) {
    return other->request->cache_salt == sequence.request->cache_salt;
  };
  // Returns the tokens to wait for, or 0.
  const auto brings = [&](const auto& other) -> int64_t {
    if (!shares(other)) {
      return 0;
    }
    // The last token of a prompt is always computed.
    const int64_t end = std::min(sequence.num_tokens() - 1, other->num_tokens());
    if (whole(end) < min_shared || whole(end) <= whole(other->num_computed)) {
      return 0;
    }
    const auto tokens = std::span(sequence.tokens).first(static_cast<size_t>(end));
    const auto differ = std::ranges::mismatch(tokens, other->tokens).in1;
    const int64_t shared = whole(differ - tokens.begin());
    return shared >= min_shared && shared > whole(other->num_computed) ? shared : 0;
  };
  const auto beginning = std::span(sequence.tokens).first(static_cast<size_t>(min_shared));
  const auto is_alike = [&](const auto& other) {
    return shares(other) && std::ranges::mismatch(beginning, other->tokens).in1 == beginning.end();
  };
  const auto source = std::ranges::find_if(running_, [&](const auto& s) { return brings(s) > 0; });
  if (source == running_.end() ||
      !std::ranges::all_of(waiting_ | std::views::take(config_.max_batch_size), is_alike)) {
    return false;
  }
  manager_.AddBranch((*source)->request->id, brings(*source) / length);
  return true;
}

void Scheduler::Build() {
  for (const bool decode : {true, false}) {
    for (auto& sequence : running_) {
      if (sequence->num_planned > 0 && (sequence->num_planned == 1) == decode) {
        batch_.Add(*sequence);
      }
    }
  }
  batch_.BuildTables(manager_, groups_);
  if (manager_.has_states()) {
    batch_.BuildStates(manager_);
  }
  batch_.Finish();
}

void Scheduler::StepDone() {
  for (Sequence* sequence : batch_.sequences) {
    // The last token is never part of the step if there was a draft: its row chose it.
    const int64_t known = sequence->num_tokens() - (sequence->draft.empty() ? 0 : 1);
    sequence->num_computed = std::min(sequence->num_computed + sequence->num_planned, known);
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
