// ④⑤ The engine loop: takes requests from one locked queue, runs steps, and writes outputs to
// another queue.

#include "turbomind/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/core/mapped_file.h"
#include "turbomind/engine/engine_state.h"
#include "turbomind/engine/output_list.h"
#include "turbomind/engine/prefix_exchange.h"

namespace turbomind {
namespace {

#ifdef NDEBUG
constexpr bool kIsDebugBuild = false;
#else
constexpr bool kIsDebugBuild = true;
#endif

void RequireIds(const char* field, const std::vector<int32_t>& ids, int vocab_size) {
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      throw InvalidArgument(field, "contains token id " + std::to_string(id) +
                                       ". It must be 0 to " + std::to_string(vocab_size - 1));
    }
  }
}

void RequireNonEmpty(const char* field, const std::vector<std::vector<int32_t>>& sequences) {
  for (const auto& sequence : sequences) {
    if (sequence.empty()) {
      throw InvalidArgument(field, "contains an empty token sequence. Remove it.");
    }
  }
}

// A pooled prompt computes no logits.
void RequirePromptOnly(const Request& request) {
  if (request.pooling != Pooling::kNone &&
      (request.max_new_tokens > 0 || request.num_prompt_logprobs >= 0 ||
       request.logits_output != LogitsOutput::kNone)) {
    throw InvalidArgument("pooling",
                          "cannot be combined with new tokens, log-probabilities or logits. Set "
                          "max_new_tokens to 0 and request only the pooled vector.");
  }
}

}  // namespace

struct Engine::Impl {
  Impl(ModelConfig model_config, const EngineConfig& engine_config,
       std::shared_ptr<const Weights> model_weights, std::shared_ptr<Device> target,
       int64_t free_bytes)
      : model(Resolved(std::move(model_config), engine_config.session_len)),
        config(WithoutDraftWeights(engine_config)),
        plan(PlanMemory(model, config, free_bytes, target->capability())),
        state(std::in_place, model, engine_config, plan, free_bytes, std::move(model_weights),
              std::move(target)) {
    PublishStep();
    thread = std::thread([this] { Loop(); });
  }

  // Any thread.

  void CheckRequest(const Request& request) const;
  void Submit(const std::shared_ptr<Request>& request);
  void Stop();
  // Runs `work` on the engine thread between two steps. Its exceptions are rethrown as
  // InternalError.
  void RunBetweenSteps(std::function<void()> work);

  PrefixPieces Pieces();

  // Engine thread.

  void Loop();
  bool Wait();          // waits for work; returns false to stop
  bool TakeRequests();  // returns true if a request was cancelled
  void EndCancelled();
  void Step();
  void CheckMappedFiles() const;  // throws if the step may have read zeros instead of weights
  bool QueuesChanged() const;     // returns true if a queue's length changed since PublishStep
  void EndAll(FinishReason reason, const std::string& error);
  void End(const Sequence* sequence);
  void Publish(Sequence& sequence);
  void CollectStats();  // sets `totals`
  void PublishStep();   // makes the outputs and statistics visible to other threads

  const ModelConfig model;
  const EngineConfig config;
  const int short_rope_length = ShortRopeLength(model, config.session_len);
  const MemoryPlan plan;

  // Used by the engine thread.
  std::optional<EngineState> state;  // reset after the thread has been joined
  EngineStats totals;
  bool checked_idle = false;
  uint64_t next_arrival = 0;
  OutputList ready;  // outputs of this step

  // Shared, under `mutex`.
  mutable std::mutex mutex;
  std::condition_variable work_arrived;
  std::condition_variable outputs_arrived;
  std::vector<std::unique_ptr<Sequence>> submitted;
  std::vector<std::packaged_task<std::string()>> tasks;
  std::unordered_map<uint64_t, std::shared_ptr<Request>> live;  // until the last output
  // Finished requests. The thread that takes the outputs destroys them, because destroying a
  // callback may wait for Python's lock.
  std::vector<std::shared_ptr<Request>> gone;
  OutputList outputs;
  size_t outputs_expected = 1;  // per step
  EngineStats stats;
  int64_t touched_bytes = 0;
  bool any_cancelled = false;
  bool stopping = false;
  bool stopped = false;  // the loop has ended; no more output follows
  bool healthy = true;
  std::string failure;

  std::mutex join_mutex;
  std::thread thread;
};

void Engine::Impl::CheckRequest(const Request& request) const {
  if (request.prompt.empty()) {
    throw InvalidArgument("The prompt has no tokens. It needs at least one.");
  }
  const auto length = static_cast<int64_t>(request.prompt.size());
  if (request.max_new_tokens < 0 || request.min_new_tokens < 0) {
    throw InvalidArgument("max_new_tokens", "and min_new_tokens are " +
                                                std::to_string(request.max_new_tokens) + ", " +
                                                std::to_string(request.min_new_tokens) +
                                                ". They must not be negative.");
  }
  if (request.num_resumed < 0 || request.num_resumed >= length ||
      (request.num_resumed > 0 && request.num_resumed >= request.max_new_tokens)) {
    throw InvalidArgument(
        "num_resumed", "is " + std::to_string(request.num_resumed) +
                           ". It must be less than the length of the prompt and max_new_tokens.");
  }
  const int64_t wanted = length + (request.max_new_tokens > 0 ? 1 : 0);
  const std::string got = "The prompt has " + std::to_string(length) + " tokens" +
                          (request.max_new_tokens > 0 ? " and needs room for one new token" : "");
  if (wanted > config.session_len) {
    throw InvalidArgument(got + ", but session_len is " + std::to_string(config.session_len) +
                          ". Shorten the prompt or raise --session-len.");
  }
  if (wanted > plan.max_sequence_tokens) {
    throw InvalidArgument(got + ", but the whole KV cache holds " +
                          std::to_string(plan.max_sequence_tokens) +
                          ". Shorten the prompt or raise --cache-max-entry-count.");
  }
  const int64_t longest =
      std::min<int64_t>(length + request.max_new_tokens - request.num_resumed, config.session_len);
  if (short_rope_length > 0 && longest > short_rope_length && !request.long_rope) {
    throw InvalidArgument("long_rope", "is false. It must be true for a sequence of up to " +
                                           std::to_string(longest) +
                                           " tokens, which is more than " +
                                           std::to_string(short_rope_length));
  }
  RequirePromptOnly(request);
  RequireIds("prompt", request.prompt, model.vocab_size);
  RequireNonEmpty("stop_sequences", request.stop_sequences);
  RequireNonEmpty("bad_sequences", request.bad_sequences);
}

void Engine::Impl::Submit(const std::shared_ptr<Request>& request) {
  CheckRequest(*request);
  // Allocated here and not between steps: a long prompt takes time, and memory may be short.
  std::unique_ptr<Sequence> sequence = MakeSequence(request, config);
  const std::lock_guard lock(mutex);
  if (!healthy) {
    throw InternalError("the engine has failed: " + failure);
  }
  if (stopping) {
    throw InternalError("the engine is closed");
  }
  if (!live.emplace(request->id, request).second) {
    throw InvalidArgument("Request id " + std::to_string(request->id) +
                          " is in use. Choose a new id.");
  }
  submitted.push_back(std::move(sequence));
  work_arrived.notify_one();
}

void Engine::Impl::Stop() {
  {
    const std::lock_guard lock(mutex);
    stopping = true;
    work_arrived.notify_one();
  }
  const std::lock_guard lock(join_mutex);
  if (thread.joinable()) {
    thread.join();
  }
  state.reset();
}

void Engine::Impl::RunBetweenSteps(std::function<void()> work) {
  // If the engine fails, its loop still runs the remaining tasks. Each of them must then report the
  // failure. Errors travel as text, because two threads would share an exception object.
  std::packaged_task<std::string()> task([this, work = std::move(work)]() -> std::string {
    {
      const std::lock_guard lock(mutex);
      if (!healthy) {
        return "the engine has failed: " + failure;
      }
    }
    try {
      work();
      PublishStep();
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  });
  std::future<std::string> done = task.get_future();
  {
    const std::lock_guard lock(mutex);
    if (stopped) {
      throw InternalError(healthy ? "the engine is closed" : "the engine has failed: " + failure);
    }
    tasks.push_back(std::move(task));
    work_arrived.notify_one();
  }
  if (const std::string wrong = done.get(); !wrong.empty()) {
    throw InternalError(wrong);
  }
}

PrefixPieces Engine::Impl::Pieces() {
  return {.blocks = BlocksPerPiece(state->cache),
          .run = [this](const std::function<void(SequenceManager&)>& work) {
            RunBetweenSteps([&] { work(state->manager); });
          }};
}

void Engine::Impl::Loop() {
  try {
    while (Wait()) {
      if (TakeRequests()) {
        EndCancelled();
      }
      Step();
    }
    EndAll(FinishReason::kCancelled, "");
  } catch (const std::exception& error) {
    {
      const std::lock_guard lock(mutex);
      healthy = false;
      failure = error.what();
    }
    EndAll(FinishReason::kError, std::string("the engine has failed: ") + error.what());
    state->output_processor.Drop();
  }
  // Runs the remaining tasks, so that every waiting thread gets a result.
  std::vector<std::packaged_task<std::string()>> rest;
  {
    const std::lock_guard lock(mutex);
    stopped = true;
    rest.swap(tasks);
    outputs_arrived.notify_all();
  }
  for (auto& task : rest) {
    task();
  }
}

bool Engine::Impl::Wait() {
  const bool is_idle = state->scheduler.waiting().empty() && state->scheduler.running().empty();
  if (is_idle && !checked_idle && (config.check_integrity || kIsDebugBuild)) {
    state->manager.CheckIntegrity(config.check_integrity);
    checked_idle = true;
  }
  std::vector<std::packaged_task<std::string()>> now;
  {
    std::unique_lock lock(mutex);
    if (is_idle) {
      work_arrived.wait(lock, [this] { return stopping || !submitted.empty() || !tasks.empty(); });
    }
    if (stopping) {
      return false;
    }
    now.swap(tasks);
  }
  for (auto& task : now) {
    task();
  }
  return true;
}

// Takes requests and the cancel flag under one lock, so that the flag never arrives before its
// request.
bool Engine::Impl::TakeRequests() {
  std::vector<std::unique_ptr<Sequence>> taken;
  bool cancelled = false;
  {
    const std::lock_guard lock(mutex);
    taken.swap(submitted);
    stats.num_waiting += static_cast<int>(taken.size());  // until the next plan updates it
    cancelled = std::exchange(any_cancelled, false);
  }
  for (auto& sequence : taken) {
    sequence->arrival = next_arrival++;
    state->scheduler.Add(std::move(sequence));
    checked_idle = false;
  }
  return cancelled;
}

void Engine::Impl::EndCancelled() {
  std::vector<Sequence*> cancelled;
  for (const auto* queue : {&state->scheduler.waiting(), &state->scheduler.running()}) {
    for (const auto& sequence : *queue) {
      if (sequence->request->cancelled.load(std::memory_order_relaxed)) {
        cancelled.push_back(sequence.get());
      }
    }
  }
  for (Sequence* sequence : cancelled) {
    sequence->output.finish_reason = FinishReason::kCancelled;
    End(sequence);
  }
  PublishStep();
}

bool Engine::Impl::QueuesChanged() const {
  return totals.num_running != static_cast<int>(state->scheduler.running().size()) ||
         totals.num_waiting != static_cast<int>(state->scheduler.waiting().size());
}

void Engine::Impl::Step() {
  if (state->drafts != nullptr) {
    state->drafts->Draft(state->scheduler.running());
  }
  const Batch& batch = state->scheduler.Plan();
  if (!batch.empty()) {
    if (QueuesChanged()) {
      PublishStep();  // published before the step, which may take seconds
    }
    state->output_processor.Begin(batch);
    state->decoder.Forward({.tokens = batch.tokens.data(),
                            .batch = batch.Views(),
                            .rows = state->output_processor.rows(),
                            .states = batch.States(),
                            .restores = batch.restores,
                            .checkpoints = batch.checkpoints});
    state->output_processor.Run(state->decoder);
    state->scheduler.StepDone();
    CheckMappedFiles();
    ++totals.num_steps;
    for (Sequence* sequence : batch.sequences) {
      const auto num_new = static_cast<int64_t>(sequence->output.tokens.size());
      const auto num_drafted = static_cast<int64_t>(sequence->draft.size());
      totals.generated_tokens += num_new;
      totals.draft_tokens += num_drafted;
      totals.accepted_tokens += std::clamp<int64_t>(num_new - 1, 0, num_drafted);
      if (sequence->finished()) {
        End(sequence);
      } else {
        Publish(*sequence);
      }
    }
    if (config.check_integrity) {
      state->manager.CheckIntegrity(true);
    }
    if (config.check_integrity && state->drafts != nullptr) {
      state->drafts->CheckIntegrity();
    }
  }
  PublishStep();
}

void Engine::Impl::CheckMappedFiles() const {
  std::ranges::for_each(state->weights->in_place, CheckMappedFile);
}

// Removes the sequence from the scheduler. Its last output carries the reason.
void Engine::Impl::End(const Sequence* sequence) {
  const std::unique_ptr<Sequence> ended = state->scheduler.Remove(sequence);
  Publish(*ended);
}

void Engine::Impl::Publish(Sequence& sequence) {
  RequestOutput& output = sequence.output;
  const bool is_empty =
      output.tokens.empty() && output.prompt_logprobs.empty() && output.logits.empty();
  if (is_empty && !sequence.finished()) {
    return;
  }
  output.cached_tokens = sequence.cached_tokens;
  ready.Add(output);
  output.request_id = sequence.request->id;
}

void Engine::Impl::EndAll(FinishReason reason, const std::string& error) {
  ready.Clear();
  state->scheduler.Abandon();
  // Declared before the lock so that it is destroyed after it: destroying a callback may wait for a
  // thread that holds this lock.
  decltype(live) ended;
  decltype(submitted) refused;
  decltype(gone) left;
  const std::lock_guard lock(mutex);
  left.swap(gone);
  ended.swap(live);
  refused.swap(submitted);
  stats.num_running = stats.num_waiting = 0;
  std::vector<uint64_t> ids;
  for (const auto& [id, request] : ended) {
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  for (uint64_t id : ids) {
    RequestOutput output;
    output.request_id = id;
    output.finish_reason = reason;
    output.error = error;
    outputs.Add(output);
  }
  outputs_arrived.notify_all();
}

void Engine::Impl::CollectStats() {
  totals.num_running = static_cast<int>(state->scheduler.running().size());
  totals.num_waiting = static_cast<int>(state->scheduler.waiting().size());
  const auto sum = [this](int first, int last) {
    BlockCounts sums;
    for (int pool = first; pool < last; ++pool) {
      const BlockCounts counts = state->manager.counts(pool);
      sums.total += counts.total;
      sums.free += counts.free;
      sums.cached += counts.cached;
      sums.active += counts.active;
    }
    return sums;
  };
  const BlockCounts quantized = sum(0, state->cache.num_groups());
  totals.blocks_total = quantized.total;
  totals.blocks_free = quantized.free;
  totals.blocks_cached = quantized.cached;
  totals.blocks_active = quantized.active;
  const BlockCounts window16 = sum(state->cache.num_groups(), state->cache.num_kv_pools());
  totals.window16_blocks_total = window16.total;
  totals.window16_blocks_free = window16.free;
  totals.window16_blocks_cached = window16.cached;
  totals.window16_blocks_active = window16.active;
  const BlockCounts checkpoints = sum(state->cache.num_kv_pools() + 1, state->cache.num_pools());
  totals.checkpoints_total = checkpoints.total;
  totals.checkpoints_kept = checkpoints.cached + checkpoints.active;
  totals.prompt_tokens = state->scheduler.stats().prompt_tokens;
  totals.prefix_queried_tokens = state->scheduler.stats().prefix_queried_tokens;
  totals.prefix_hit_tokens = state->scheduler.stats().prefix_hit_tokens;
  totals.prefix_cut_tokens = state->scheduler.stats().prefix_cut_tokens;
  totals.num_preemptions = state->scheduler.stats().num_preemptions;
  totals.num_nonfinite = state->decoder.num_nonfinite();
  const std::vector<LayerGroup>& groups = state->cache.groups();
  totals.clipped.resize(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    totals.clipped[g] = {groups[g].window, state->decoder.num_clipped()[g]};
  }
}

void Engine::Impl::PublishStep() {
  CollectStats();
  const std::lock_guard lock(mutex);
  stats = totals;
  touched_bytes = state->manager.touched_bytes();
  if (ready.empty()) {
    return;
  }
  outputs_expected = ready.size();
  for (RequestOutput& output : ready.items()) {
    if (output.finish_reason != FinishReason::kNone) {
      const auto found = live.find(output.request_id);
      gone.push_back(std::move(found->second));
      live.erase(found);
    }
    outputs.Add(output);
  }
  ready.Clear();
  outputs_arrived.notify_all();
}

Engine::Engine(ModelConfig model, const EngineConfig& config,
               std::shared_ptr<const Weights> weights, std::shared_ptr<Device> device,
               int64_t free_bytes)
    : impl_(std::make_unique<Impl>(std::move(model), config, std::move(weights), std::move(device),
                                   free_bytes)) {}

Engine::~Engine() { Stop(); }

void Engine::Stop() { impl_->Stop(); }

void Engine::Submit(const std::shared_ptr<Request>& request) { impl_->Submit(request); }

void Engine::Cancel(uint64_t request_id) {
  const std::lock_guard lock(impl_->mutex);
  const auto found = impl_->live.find(request_id);
  if (found != impl_->live.end()) {
    found->second->cancelled.store(true, std::memory_order_relaxed);
    impl_->any_cancelled = true;
  }
}

std::vector<RequestOutput> Engine::WaitOutputs(int timeout_ms) {
  if (timeout_ms < 0) {
    throw InvalidArgument("timeout_ms",
                          "is " + std::to_string(timeout_ms) + ". It must not be negative.");
  }
  std::unique_lock lock(impl_->mutex);
  const size_t expected = impl_->outputs_expected;
  lock.unlock();  // allocates, on the client's thread, the outputs that the engine will write into
  OutputList taken(expected);
  // Declared before the lock is taken again and destroyed after it: destroying a callback may wait
  // for a thread that holds this lock.
  decltype(impl_->gone) gone;
  lock.lock();
  impl_->outputs_arrived.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                  [this] { return !impl_->outputs.empty() || impl_->stopped; });
  if (impl_->outputs.empty()) {
    return {};
  }
  std::swap(impl_->outputs, taken);
  std::swap(impl_->gone, gone);
  lock.unlock();
  return std::move(taken).TakeItems();
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(impl_->mutex);
  EngineStats stats = impl_->stats;
  stats.num_waiting += static_cast<int>(impl_->submitted.size());
  return stats;
}

MemoryPlan Engine::memory_plan() const {
  const std::lock_guard lock(impl_->mutex);
  MemoryPlan plan = impl_->plan;
  plan.touched_bytes = impl_->touched_bytes;
  return plan;
}

bool Engine::healthy() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->healthy;
}

std::string Engine::failure() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->failure;
}

void Engine::ClearPrefixCache() {
  impl_->RunBetweenSteps([this] { impl_->state->manager.ClearPrefixCache(); });
}

int64_t Engine::CachedTokens(std::span<const int32_t> prompt, const CacheSalt& salt) {
  int64_t num_tokens = 0;
  impl_->RunBetweenSteps([&] { num_tokens = impl_->state->manager.CachedTokens(prompt, salt); });
  return num_tokens;
}

std::vector<BlockCopies> Engine::ExportPrefix(std::span<const int32_t> tokens, int64_t first,
                                              const CacheSalt& salt) {
  return ExportInPieces({tokens, first, salt}, impl_->Pieces());
}

int64_t Engine::ImportPrefix(std::span<const int32_t> tokens, int64_t first,
                             std::span<const BlockViews> copies, const CacheSalt& salt) {
  return ImportInPieces({tokens, first, salt}, copies, impl_->Pieces());
}

KvStatistics Engine::kv_statistics() {
  if (!impl_->config.collect_kv_statistics) {
    throw InvalidArgument("KV statistics are not collected. Set collect_kv_statistics.");
  }
  KvStatistics copy(impl_->model.num_layers, impl_->model.num_kv_heads, impl_->model.head_dim);
  impl_->RunBetweenSteps([this, &copy] { copy = *impl_->state->statistics; });
  return copy;
}

void Engine::CheckIntegrity() {
  impl_->RunBetweenSteps([this] { impl_->state->manager.CheckIntegrity(true); });
}

}  // namespace turbomind
