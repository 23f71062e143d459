#pragma once

// ⑤ One step's flat arrays.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/engine/sequence.h"
#include "turbomind/kv/layer_group.h"
#include "turbomind/kv/sequence_manager.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {

// The flat arrays of one step. Sequences with exactly one new token come first (decode). A sequence
// with a draft has more, like a prompt. The scheduler fills the arrays and the decoder reads them
// through Views(). Every step reuses the memory, so a step no larger than an earlier one allocates
// nothing.
struct Batch {
  struct BlockTables {
    std::vector<int32_t> ids;           // [num_seqs, stride], -1 beyond a sequence's blocks
    std::vector<int32_t> window16_ids;  // same shape; empty if there is no 16-bit window
    int64_t stride = 0;
    std::vector<PendingQuantization> blocks_to_quantize;

    // Writes a sequence's row. REQUIRES: at most `stride` blocks in either pool.
    void SetRow(size_t row, std::span<const int32_t> quantized, std::span<const int32_t> window16);
  };

  explicit Batch(int num_groups)
      : tables(static_cast<size_t>(num_groups)), views(static_cast<size_t>(num_groups)) {}
  Batch(const Batch&) = delete;  // the views point into it
  Batch& operator=(const Batch&) = delete;

  std::vector<Sequence*> sequences;
  int num_decode = 0;
  std::vector<int32_t> tokens;        // [num_tokens]
  std::vector<int32_t> positions;     // [num_tokens]
  std::vector<int32_t> rope_sets;     // [num_tokens]
  std::vector<int32_t> cu_seqlens;    // [num_seqs + 1]
  std::vector<int32_t> context_lens;  // [num_seqs]
  std::vector<BlockTables> tables;    // by layer group
  std::vector<BatchView> views;       // by layer group, see Views()
  // The states of recurrent layers; empty if there are none.
  std::vector<int32_t> state_slots;    // [num_seqs]
  std::vector<StateSave> saves;        // in the order of StateBatch
  std::vector<StateCopy> checkpoints;  // states that are copied to them after the step
  std::vector<StateCopy> restores;     // before the step

  bool empty() const { return sequences.empty(); }
  int num_seqs() const { return static_cast<int>(sequences.size()); }
  int num_tokens() const { return static_cast<int>(tokens.size()); }

  void Clear();
  // Appends a sequence's planned tokens. REQUIRES: no table has been reset for this batch yet.
  void Add(Sequence& sequence);
  // Resets a group's tables for the batch's sequences: `stride` entries of -1 per row, no pending
  // quantizations. The caller then fills the rows and the pending quantizations.
  BlockTables& ResetTables(size_t group, int64_t stride, bool has_window16);
  // Fills the tables of all groups with the blocks of the batch's sequences.
  void BuildTables(const SequenceManager& manager, const std::vector<LayerGroup>& groups);
  // Fills the states. REQUIRES: the manager has states.
  void BuildStates(const SequenceManager& manager);
  // Makes the views. Call it when the batch is complete.
  void Finish();

  // Returns one view per group. Valid after Finish() while the batch is unchanged.
  std::span<const BatchView> Views() const { return views; }
  // Returns the states of the step. Valid while the batch is unchanged.
  StateBatch States() const {
    return {.slots = state_slots.data(),
            .saves = saves.data(),
            .num_saves = static_cast<int>(saves.size())};
  }
};

}  // namespace turbomind
