// ⑤ Computes the drafts of a smaller model with the same vocabulary.

#include "turbomind/engine/draft_decoder.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <span>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/engine/memory_plan.h"

namespace turbomind {
namespace {

const DraftModel& DraftModelOf(const EngineConfig& config) {
  Check(config.draft_model != nullptr && config.draft_model->weights != nullptr,
        "a draft model must have weights");
  return *config.draft_model;
}

}  // namespace

DraftDecoder::DraftDecoder(const EngineConfig& config, int vocab_size,
                           std::vector<int64_t> num_blocks, Device& device)
    : vocab_size_(vocab_size),
      session_len_(config.session_len),
      model_(Resolved(DraftModelOf(config).model, config.session_len, false)),
      device_(device),
      cache_(device, CacheConfig(model_, DraftConfig(config)), std::move(num_blocks)),
      manager_(cache_, false),
      decoder_({.model = model_,
                .layers = MakeLayerCaches(model_, cache_),
                .limits = PlanStep(DraftConfig(config), device.capability())},
               DraftModelOf(config).weights, device),
      max_step_tokens_(StepTokens(config)),
      batch_(cache_.num_groups()) {}

void DraftDecoder::Draft(const std::deque<std::unique_ptr<Sequence>>& running) {
  planned_.clear();
  tokens_left_ = max_step_tokens_;
  for (auto& [id, follower] : followers_) {
    follower->is_running = false;
  }
  try {
    for (const auto& sequence : running) {
      Follow(*sequence);
    }
    DropEnded();
    while (!planned_.empty()) {
      RunStep();
    }
  } catch (const std::bad_alloc&) {
    // The step runs with the candidates so far. A token that was not computed is not counted.
  }
}

void DraftDecoder::Follow(const Sequence& sequence) {
  auto* drafter = dynamic_cast<ModelDrafter*>(sequence.drafter.get());
  if (drafter == nullptr) {
    return;
  }
  const bool decodes = sequence.num_missing() == 1;
  if (decodes) {
    drafter->Update(sequence.tokens);
  }
  Follower& follower = FollowerOf(sequence);
  follower.is_running = true;
  follower.drafter = drafter;
  follower.num_wanted = 0;
  follower.copy.num_planned = 0;
  if (!TakeTokens(sequence, follower) || !drafter->candidate().empty()) {
    return;
  }
  const int64_t end = decodes ? sequence.num_tokens() : sequence.num_computed;
  const int64_t to_come = std::min(sequence.request->max_new_tokens - sequence.num_generated(),
                                   session_len_ - sequence.num_tokens());
  const int64_t wanted = decodes ? std::clamp<int64_t>(to_come - 1, 0, drafter->WantedLength()) : 0;
  const int64_t planned = std::min(end - follower.copy.num_computed, tokens_left_);
  if (planned <= 0 || (decodes && wanted == 0) ||
      !manager_.AllocateDataAndScaleBlocks(sequence.request->id, end + wanted)) {
    return;
  }
  const bool arrives = decodes && follower.copy.num_computed + planned == end;
  follower.num_wanted = arrives ? static_cast<int>(wanted) : 0;
  follower.copy.num_planned = planned;
  tokens_left_ -= planned;
  planned_.push_back(&follower);
}

DraftDecoder::Follower& DraftDecoder::FollowerOf(const Sequence& sequence) {
  std::unique_ptr<Follower>& follower = followers_[sequence.request->id];
  if (follower == nullptr) {
    auto made = std::make_unique<Follower>();
    // Not the sequence's request, which must not be destroyed here (Engine::Impl::gone).
    made->copy.request = std::make_shared<Request>();
    made->copy.request->id = sequence.request->id;
    made->copy.tokens.reserve(sequence.tokens.capacity() + kMaxDraftTokens);
    manager_.Create(sequence.request->id, sequence.tokens, false);
    follower = std::move(made);
  }
  return *follower;
}

bool DraftDecoder::TakeTokens(const Sequence& sequence, Follower& follower) const {
  std::vector<int32_t>& tokens = follower.copy.tokens;
  const auto known = static_cast<std::ptrdiff_t>(follower.num_known);
  const auto differ = std::mismatch(tokens.begin() + known, tokens.end(),
                                    sequence.tokens.begin() + known, sequence.tokens.end());
  const auto came = std::span(sequence.tokens).subspan(static_cast<size_t>(known));
  if (std::ranges::any_of(came, [this](int32_t id) { return id >= model_.vocab_size; })) {
    return false;
  }
  // K and V of right drafts stay. The last token is computed again, because its logits are needed.
  const int64_t computed = std::min(
      {follower.copy.num_computed, differ.first - tokens.begin(), sequence.num_tokens() - 1});
  follower.copy.num_computed = std::max(computed, manager_.num_written(sequence.request->id));
  tokens.resize(static_cast<size_t>(known));
  tokens.insert(tokens.end(), came.begin(), came.end());
  follower.num_known = sequence.num_tokens();
  return true;
}

void DraftDecoder::DropEnded() {
  std::erase_if(followers_, [this](const auto& entry) {
    if (!entry.second->is_running) {
      manager_.FreeDataAndScaleBlocks(entry.first);
    }
    return !entry.second->is_running;
  });
}

void DraftDecoder::BuildBatch() {
  batch_.Clear();
  drafting_.clear();
  rows_.clear();
  for (const bool decode : {true, false}) {
    for (Follower* follower : planned_) {
      if ((follower->copy.num_planned == 1) != decode) {
        continue;
      }
      batch_.Add(follower->copy);
      if (follower->num_wanted > 0) {
        drafting_.push_back(follower);
        rows_.push_back(static_cast<int32_t>(batch_.num_tokens() - 1));
      }
    }
  }
  batch_.BuildTables(manager_, cache_.groups());
  batch_.Finish();
}

void DraftDecoder::RunStep() {
  BuildBatch();
  decoder_.Forward({.tokens = batch_.tokens.data(), .batch = batch_.Views(), .rows = rows_});
  for (Follower* follower : planned_) {
    Sequence& copy = follower->copy;
    copy.num_computed += copy.num_planned;
    copy.num_planned = 0;
    const int64_t known = std::min(copy.num_computed, follower->num_known);
    manager_.Commit(copy.request->id, std::span(copy.tokens).first(static_cast<size_t>(known)));
  }
  chosen_.resize(rows_.size());
  const auto max_rows = static_cast<size_t>(decoder_.max_logit_rows());
  for (size_t first = 0; first < rows_.size(); first += max_rows) {
    TakeArgMax(first, std::min(max_rows, rows_.size() - first));
  }
  planned_.clear();
  for (size_t i = 0; i < drafting_.size(); ++i) {
    Append(*drafting_[i], chosen_[i]);
  }
}

void DraftDecoder::TakeArgMax(size_t first, size_t count) {
  decoder_.ComputeLogits(static_cast<int>(first), static_cast<int>(count));
  if (decoder_.ArgMaxTokens(chosen_.data() + first)) {
    return;
  }
  all_rows_.resize(count);
  std::iota(all_rows_.begin(), all_rows_.end(), 0);
  const float* logits = decoder_.ReadLogits(all_rows_);
  for (size_t i = 0; i < count; ++i, logits += model_.vocab_size) {
    chosen_[first + i] =
        static_cast<int32_t>(std::max_element(logits, logits + model_.vocab_size) - logits);
  }
}

void DraftDecoder::Append(Follower& follower, int32_t token) {
  if (token < 0 || token >= vocab_size_) {
    return;
  }
  follower.drafter->Propose(token);
  if (--follower.num_wanted > 0) {
    follower.copy.tokens.push_back(token);
    follower.copy.num_planned = 1;
    planned_.push_back(&follower);
  }
}

}  // namespace turbomind
