// ⑤ One step's flat arrays.

#include "turbomind/engine/batch.h"

#include <algorithm>
#include <utility>

namespace turbomind {

void Batch::Add(Sequence& sequence) {
  if (cu_seqlens.empty()) {
    cu_seqlens.push_back(0);
  }
  const int64_t end = sequence.num_computed + sequence.num_planned;
  for (int64_t p = sequence.num_computed; p < end; ++p) {
    tokens.push_back(sequence.tokens[static_cast<size_t>(p)]);
    positions.push_back(static_cast<int32_t>(p));
  }
  num_decode += sequence.num_planned == 1 ? 1 : 0;
  cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
  context_lens.push_back(static_cast<int32_t>(end));
  sequences.push_back(&sequence);
}

void Batch::AddTables(const std::vector<std::span<const int32_t>>& cold,
                      const std::vector<std::span<const int32_t>>& hot,
                      std::vector<BlockMove> moves) {
  BlockTables table;
  for (const auto& ids : cold) {
    table.stride = std::max(table.stride, static_cast<int64_t>(ids.size()));
  }
  const auto flatten = [&](const std::vector<std::span<const int32_t>>& tables_of_pool) {
    std::vector<int32_t> flat(tables_of_pool.size() * static_cast<size_t>(table.stride), -1);
    auto row = flat.begin();
    for (const auto& ids : tables_of_pool) {
      std::copy(ids.begin(), ids.end(), row);
      row += table.stride;
    }
    return flat;
  };
  table.ids = flatten(cold);
  table.hot_ids = flatten(hot);
  table.moves = std::move(moves);
  tables.push_back(std::move(table));
}

void Batch::Clear() { *this = Batch(); }

std::vector<BatchView> Batch::Views() const {
  std::vector<BatchView> views;
  for (const BlockTables& table : tables) {
    views.push_back({.num_seqs = num_seqs(),
                     .num_decode = num_decode,
                     .num_tokens = num_tokens(),
                     .cu_seqlens = cu_seqlens.data(),
                     .context_lens = context_lens.data(),
                     .positions = positions.data(),
                     .block_tables = table.ids.data(),
                     .block_table_stride = table.stride,
                     .hot_tables = table.hot_ids.empty() ? nullptr : table.hot_ids.data(),
                     .moves = table.moves.data(),
                     .num_moves = static_cast<int>(table.moves.size())});
  }
  return views;
}

}  // namespace turbomind
