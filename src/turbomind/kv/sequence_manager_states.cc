// The states of recurrent layers: working slots, planned saves and checkpoints.

#include <algorithm>
#include <limits>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {

// Takes a slot for a checkpoint, for which it may evict another one. Returns -1 if there is none.
// A checkpoint that is spare at first takes only the place of another spare one.
int32_t SequenceManager::TakeCheckpoint(CheckpointKind kind) {
  BlockManager& manager = managers_[static_cast<size_t>(cache_.CheckpointPool())];
  if (manager.free() == 0) {
    const int oldest = manager.OldestCached();
    if (oldest < 0 || (IsSpareAtFirst(kind) && !manager.is_spare(oldest))) {
      return -1;
    }
    EvictOldest(cache_.CheckpointPool());
  }
  const int32_t slot = manager.Allocate();
  checkpoint_uses_[static_cast<size_t>(slot)] = {
      .serial = ++num_checkpoints_taken_,
      .kind = kind,
      .num_hits = kind == CheckpointKind::kBranch ? 1 : 0};  // two prompts share it already
  return slot;
}

// Returns the working slots that saves may take.
int64_t SequenceManager::SpareStates() const {
  const int64_t to_start = static_cast<int64_t>(sequences_.size()) - num_stateful_;
  return managers_[static_cast<size_t>(cache_.StatePool())].free() - to_start;
}

// Returns -1 if there is none.
int32_t SequenceManager::TakeSpareState() {
  return SpareStates() > 0 ? managers_[static_cast<size_t>(cache_.StatePool())].Allocate() : -1;
}

int64_t SequenceManager::MaxUncertain(uint64_t id) const {
  const Sequence& sequence = At(id);
  if (!cache_.has_states()) {
    return std::numeric_limits<int64_t>::max();
  }
  return SpareStates() + std::ranges::count_if(sequence.state.saves, [](const PlannedSave& save) {
           return save.slot >= 0;
         });
}

// Plans the saves of the step of num_planned tokens. Those of an earlier plan, which never ran, are
// released. REQUIRES: there are slots for the uncertain tokens.
void SequenceManager::PlanSaves(Sequence& sequence, int64_t num_uncertain) {
  State& state = sequence.state;
  if (state.slot < 0) {
    state.slot = taken_[static_cast<size_t>(cache_.StatePool())].front();
    ++num_stateful_;
  }
  ReleaseSaves(sequence);
  const int64_t length = cache_.block_seq_len();
  const int64_t end = sequence.num_planned;
  const int64_t certain = end - num_uncertain;
  const auto kind_at = [&](int64_t position) {
    return enable_prefix_caching_ && position % length == 0 ? state.rule.After(position / length)
                                                            : CheckpointKind::kNone;
  };
  for (int64_t position = certain; position < end; ++position) {
    const CheckpointKind kind = kind_at(position);
    const int32_t checkpoint = kind == CheckpointKind::kNone ? -1 : TakeCheckpoint(kind);
    state.saves.push_back({position, TakeSpareState(), checkpoint, kind});
  }
  // Those that matter most get their slots first.
  for (const bool are_spare : {false, true}) {
    for (int64_t position = (sequence.num_written / length + 1) * length; position <= end;
         position += length) {
      const CheckpointKind kind = kind_at(position);
      const bool is_planned = position >= certain && position < end;
      if (kind == CheckpointKind::kNone || is_planned || IsSpareAtFirst(kind) != are_spare) {
        continue;
      }
      if (position < end && SpareStates() == 0) {
        continue;
      }
      if (const int32_t checkpoint = TakeCheckpoint(kind); checkpoint >= 0) {
        const int32_t slot = position < end ? TakeSpareState() : -1;
        state.saves.push_back({position, slot, checkpoint, kind});
      }
    }
  }
  std::ranges::sort(state.saves, {}, &PlannedSave::position);
}

// Records that a prompt begins with the blocks of `path`, but cannot use them all.
void SequenceManager::NoteBranch(State& state, const std::vector<std::vector<int>>& path) {
  state.is_cut = true;
  const auto num_blocks = static_cast<int64_t>(path.size());
  const bool has_block = std::ranges::any_of(path.back(), [](int block) { return block >= 0; });
  const size_t num_others = has_block ? trie_.NumChildren(path.back()) : 2;
  if (num_others == 1) {
    state.rule.fork = num_blocks;
  } else if (num_others > 1) {
    state.rule.branches.push_back(num_blocks);
  }
  // If nothing follows the path, the prompt continues it, and its end is shared by none.
}

void SequenceManager::AddBranch(uint64_t id, int64_t num_blocks) {
  Sequence& sequence = At(id);
  std::vector<int64_t>& branches = sequence.state.rule.branches;
  if (cache_.has_states() && num_blocks * cache_.block_seq_len() > sequence.num_written &&
      std::ranges::find(branches, num_blocks) == branches.end()) {
    branches.push_back(num_blocks);
  }
}

// Writes the saves for the prefix cache, as far as they are written, to the table of checkpoints.
void SequenceManager::ListCheckpoints(Sequence& sequence, int64_t num_tokens) {
  const int64_t length = cache_.block_seq_len();
  std::vector<int32_t>& table = sequence.tables[static_cast<size_t>(cache_.CheckpointPool())];
  for (const PlannedSave& save : sequence.state.saves) {
    if (save.checkpoint >= 0 && save.position <= num_tokens) {
      table.resize(static_cast<size_t>(save.position / length), -1);
      table.back() = save.checkpoint;
    }
  }
}

// Releases the saves of the committed step, except the slot that the next step begins with.
void SequenceManager::FinishSaves(Sequence& sequence, int64_t num_planned, int64_t num_tokens) {
  State& state = sequence.state;
  const int pool = cache_.CheckpointPool();
  sequence.tables[static_cast<size_t>(pool)].clear();
  const bool has_run = num_tokens > sequence.num_written;
  const int32_t restored = has_run ? std::exchange(state.restore, -1) : -1;
  bool is_saved = !has_run || num_tokens == num_planned;
  for (PlannedSave& save : state.saves) {
    if (save.checkpoint >= 0) {
      RankCheckpoint(sequence, save);
    }
    if (has_run && save.position == num_tokens && num_tokens < num_planned) {
      std::swap(state.slot, save.slot);
      is_saved = true;
    }
  }
  ReleaseSaves(sequence);
  if (restored >= 0) {  // last, because a checkpoint that serves hits is worth more than a new one
    UnlockBlock({pool, restored});
  }
  Check(is_saved, "the state after the committed tokens must be saved");
  sequence.num_planned = num_tokens;
}

// Marks spare what a checkpoint that has entered the prefix cache replaces, or itself.
void SequenceManager::RankCheckpoint(Sequence& sequence, const PlannedSave& save) {
  State& state = sequence.state;
  BlockManager& manager = managers_[static_cast<size_t>(cache_.CheckpointPool())];
  if (!manager.is_kept(save.checkpoint)) {
    return;
  }
  if (IsSpareAtFirst(save.kind)) {
    manager.MarkSpare(save.checkpoint);
  }
  if (save.kind == CheckpointKind::kAnswer) {
    RankAnswer(state, save.checkpoint);
  }
  if (save.position / cache_.block_seq_len() == state.rule.PromptBlocks()) {
    MarkSpareUnlessUsed(std::exchange(state.served, {}), 1);
    state.prompt = RefTo(save.checkpoint);
  }
}

void SequenceManager::RankAnswer(State& state, int32_t checkpoint) {
  MarkSpareUnlessUsed(std::exchange(state.answer, RefTo(checkpoint)), 0);
  if (IsCurrent(state.prompt)) {
    checkpoint_uses_[static_cast<size_t>(state.prompt.slot)].has_answer = true;
  }
  if (answer_trend_ > 0) {
    MarkSpareUnlessUsed(state.prompt, 0);
  } else if (answer_trend_ < 0) {
    MarkSpareUnlessUsed(state.answer, 0);
  }
}

// Counts a hit of the checkpoint to restore.
void SequenceManager::MarkServedCheckpoint(State& state) {
  constexpr int kMaxTrend = 16;
  CheckpointUse& use = checkpoint_uses_[static_cast<size_t>(state.restore)];
  ++use.num_hits;
  managers_[static_cast<size_t>(cache_.CheckpointPool())].ClearSpare(state.restore);
  state.served = RefTo(state.restore);
  // Blocks after the end of the last prompt are those of its answer.
  if (use.kind == CheckpointKind::kAnswer || use.has_answer) {
    const bool continues = use.kind == CheckpointKind::kAnswer || state.is_cut;
    answer_trend_ = std::clamp(answer_trend_ + (continues ? 1 : -1), -kMaxTrend, kMaxTrend);
  }
}

SequenceManager::CheckpointRef SequenceManager::RefTo(int32_t checkpoint) const {
  return {checkpoint, checkpoint_uses_[static_cast<size_t>(checkpoint)].serial};
}

bool SequenceManager::IsCurrent(const CheckpointRef& checkpoint) const {
  return checkpoint.slot >= 0 &&
         checkpoint_uses_[static_cast<size_t>(checkpoint.slot)].serial == checkpoint.serial &&
         managers_[static_cast<size_t>(cache_.CheckpointPool())].is_kept(checkpoint.slot);
}

void SequenceManager::MarkSpareUnlessUsed(const CheckpointRef& checkpoint, int max_hits) {
  if (IsCurrent(checkpoint) &&
      checkpoint_uses_[static_cast<size_t>(checkpoint.slot)].num_hits <= max_hits) {
    managers_[static_cast<size_t>(cache_.CheckpointPool())].MarkSpare(checkpoint.slot);
  }
}

void SequenceManager::ReleaseSaves(Sequence& sequence) {
  for (const PlannedSave& save : sequence.state.saves) {
    if (save.slot >= 0) {
      UnlockBlock({cache_.StatePool(), save.slot});
    }
    if (save.checkpoint >= 0) {
      UnlockBlock({cache_.CheckpointPool(), save.checkpoint});
    }
  }
  sequence.state.saves.clear();
}

void SequenceManager::ReleaseStates(Sequence& sequence) {
  State& state = sequence.state;
  ReleaseSaves(sequence);
  if (state.restore >= 0) {
    UnlockBlock({cache_.CheckpointPool(), std::exchange(state.restore, -1)});
  }
  if (state.slot >= 0) {
    UnlockBlock({cache_.StatePool(), std::exchange(state.slot, -1)});
    --num_stateful_;
  }
}

}  // namespace turbomind
