#pragma once

// ⑤ Computes the drafts of a smaller model with the same vocabulary.

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "turbomind/engine/batch.h"
#include "turbomind/engine/engine_config.h"
#include "turbomind/kv/kv_cache.h"
#include "turbomind/kv/sequence_manager.h"
#include "turbomind/model/decoder.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// The decoder of the draft model and its own 16-bit cache. It follows the sequences that run: it
// computes the tokens that the engine has computed, and then drafts greedily after each sequence
// that decodes, all of them in one batch. Candidates go to the sequences' ModelDrafter.
//
// A sequence that stops running, also by preemption, loses its blocks here. It is computed again if
// it returns. A sequence for which the cache has no block gets no candidate. Whatever this model
// computes, the engine's answers stay the same, because it verifies each token.
//
// Only the engine thread may use it.
class DraftDecoder {
 public:
  // `config` has a draft model with weights. `num_blocks` is by pool (PlanDraftBlocks). Candidates
  // have tokens below `vocab_size`. Throws InvalidArgument for a wrong model, and std::bad_alloc.
  DraftDecoder(const EngineConfig& config, int vocab_size, std::vector<int64_t> num_blocks,
               Device& device);
  DraftDecoder(const DraftDecoder&) = delete;
  DraftDecoder& operator=(const DraftDecoder&) = delete;

  // Computes the candidates of the sequences that decode in the next step. Longer parts of prompts
  // are computed over several calls, each of which computes at most the tokens of one step and of
  // one draft for each sequence.
  void Draft(const std::deque<std::unique_ptr<Sequence>>& running);

  // Throws InternalError that names the broken invariant of the pools.
  void CheckIntegrity() const { manager_.CheckIntegrity(); }

 private:
  // The copy of a sequence. Its tokens are those of the engine's sequence, and in a draft also the
  // candidate.
  struct Follower {
    Sequence copy;
    int64_t num_known = 0;  // tokens that are the engine's
    ModelDrafter* drafter = nullptr;
    int num_wanted = 0;  // tokens of the candidate still to be computed
    bool is_running = false;
  };

  // Plans what the sequence's follower computes first.
  void Follow(const Sequence& sequence);
  Follower& FollowerOf(const Sequence& sequence);
  // Replaces the copy's candidate by the tokens that came. Returns false if the model does not have
  // one of them.
  bool TakeTokens(const Sequence& sequence, Follower& follower) const;
  void DropEnded();
  // Computes the planned tokens and appends the next one of each follower that drafts.
  void RunStep();
  void BuildBatch();
  void TakeArgMax(size_t first, size_t count);
  void Append(Follower& follower, int32_t token);

  const int vocab_size_;
  const int64_t session_len_;
  const ModelConfig model_;
  Device& device_;
  KvCache cache_;
  SequenceManager manager_;
  Decoder decoder_;
  const int64_t max_step_tokens_;
  std::unordered_map<uint64_t, std::unique_ptr<Follower>> followers_;  // by request id

  // Of the current call.
  int64_t tokens_left_ = 0;
  std::vector<Follower*> planned_;
  std::vector<Follower*> drafting_;  // whose next token the step computes, in the batch's order
  std::vector<int32_t> rows_;        // their last rows
  std::vector<int32_t> chosen_;
  std::vector<int32_t> all_rows_;
  Batch batch_;
};

}  // namespace turbomind
