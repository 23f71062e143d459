// ⑤ One step's flat arrays.

#include "turbomind/engine/batch.h"

#include <algorithm>

#include "turbomind/core/check.h"

namespace turbomind {

void Batch::Add(Sequence& sequence) {
  if (cu_seqlens.empty()) {
    cu_seqlens.push_back(0);
  }
  const int64_t end = sequence.num_computed + sequence.num_planned;
  for (int64_t p = sequence.num_computed; p < end; ++p) {
    const int64_t in_draft = p - sequence.num_tokens();
    tokens.push_back(in_draft < 0 ? sequence.tokens[static_cast<size_t>(p)]
                                  : sequence.draft[static_cast<size_t>(in_draft)]);
    positions.push_back(static_cast<int32_t>(p));
    rope_sets.push_back(sequence.request->long_rope ? 1 : 0);
  }
  num_decode += sequence.num_planned == 1 ? 1 : 0;
  cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
  context_lens.push_back(static_cast<int32_t>(end));
  sequences.push_back(&sequence);
}

void Batch::BlockTables::SetRow(size_t row, std::span<const int32_t> quantized,
                                std::span<const int32_t> window16) {
  const auto width = static_cast<size_t>(stride);
  Check(quantized.size() <= width && window16.size() <= width,
        "a row of the block table must not be longer than the stride");
  std::copy(quantized.begin(), quantized.end(), ids.data() + row * width);
  if (!window16.empty()) {
    std::copy(window16.begin(), window16.end(), window16_ids.data() + row * width);
  }
}

Batch::BlockTables& Batch::ResetTables(size_t group, int64_t stride, bool has_window16) {
  BlockTables& table = tables.at(group);
  table.stride = stride;
  const size_t size = sequences.size() * static_cast<size_t>(stride);
  table.ids.assign(size, -1);
  table.window16_ids.assign(has_window16 ? size : 0, -1);
  table.blocks_to_quantize.clear();
  return table;
}

// Relies on equal table lengths in both pools of a group.
void Batch::BuildTables(const SequenceManager& manager, const std::vector<LayerGroup>& groups) {
  const int num_groups = static_cast<int>(groups.size());
  for (int group = 0; group < num_groups; ++group) {
    const bool has_window16 = groups[static_cast<size_t>(group)].rule.enabled();
    size_t stride = 0;
    for (const Sequence* sequence : sequences) {
      stride = std::max(stride, manager.BlockTable(sequence->request->id, group).size());
    }
    BlockTables& table =
        ResetTables(static_cast<size_t>(group), static_cast<int64_t>(stride), has_window16);
    for (size_t row = 0; row < sequences.size(); ++row) {
      const uint64_t id = sequences[row]->request->id;
      table.SetRow(
          row, manager.BlockTable(id, group),
          has_window16 ? manager.BlockTable(id, num_groups + group) : std::span<const int32_t>());
      const std::span<const PendingQuantization> own = manager.BlocksToQuantize(id, group);
      table.blocks_to_quantize.insert(table.blocks_to_quantize.end(), own.begin(), own.end());
    }
  }
}

void Batch::BuildStates(const SequenceManager& manager) {
  for (const Sequence* sequence : sequences) {
    const uint64_t id = sequence->request->id;
    const int32_t slot = manager.StateSlot(id);
    for (const PlannedSave& save : manager.PlannedSaves(id)) {
      const int64_t num_tokens = save.position - sequence->num_computed;
      if (save.slot >= 0) {
        saves.push_back({.sequence = static_cast<int32_t>(state_slots.size()),
                         .num_tokens = static_cast<int32_t>(num_tokens),
                         .slot = save.slot});
      }
      if (save.checkpoint >= 0) {
        checkpoints.push_back(
            {.slot = save.slot >= 0 ? save.slot : slot, .checkpoint = save.checkpoint});
      }
    }
    if (const int32_t checkpoint = manager.CheckpointToRestore(id); checkpoint >= 0) {
      restores.push_back({.slot = slot, .checkpoint = checkpoint});
    }
    state_slots.push_back(slot);
  }
}

void Batch::Clear() {
  sequences.clear();
  num_decode = 0;
  tokens.clear();
  positions.clear();
  rope_sets.clear();
  cu_seqlens.clear();
  context_lens.clear();
  state_slots.clear();
  saves.clear();
  checkpoints.clear();
  restores.clear();
}

void Batch::Finish() {
  for (size_t group = 0; group < tables.size(); ++group) {
    const BlockTables& table = tables[group];
    views[group] = {
        .num_seqs = num_seqs(),
        .num_decode = num_decode,
        .num_tokens = num_tokens(),
        .cu_seqlens = cu_seqlens.data(),
        .context_lens = context_lens.data(),
        .positions = positions.data(),
        .block_tables = table.ids.data(),
        .block_table_stride = table.stride,
        .window16_tables = table.window16_ids.empty() ? nullptr : table.window16_ids.data(),
        .blocks_to_quantize = table.blocks_to_quantize.data(),
        .num_to_quantize = static_cast<int>(table.blocks_to_quantize.size()),
        .rope_sets = rope_sets.data()};
  }
}

}  // namespace turbomind
