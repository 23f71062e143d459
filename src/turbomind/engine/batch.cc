// ⑤ One step's flat arrays.

#include "turbomind/engine/batch.h"

#include <algorithm>

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

void Batch::AddTables(const std::vector<std::span<const int32_t>>& tables_of_group) {
  BlockTables table;
  for (const auto& ids : tables_of_group) {
    table.stride = std::max(table.stride, static_cast<int64_t>(ids.size()));
  }
  table.ids.assign(tables_of_group.size() * static_cast<size_t>(table.stride), -1);
  auto row = table.ids.begin();
  for (const auto& ids : tables_of_group) {
    std::copy(ids.begin(), ids.end(), row);
    row += table.stride;
  }
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
                     .block_table_stride = table.stride});
  }
  return views;
}

}  // namespace turbomind
