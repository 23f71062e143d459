#pragma once

// ⑤ One step's flat arrays.

#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/engine/sequence.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// Sequences with exactly one new token come first (decode). Plain data: made by the scheduler, read
// by the decoder through Views().
struct Batch {
  struct BlockTables {
    std::vector<int32_t> ids;      // [num_seqs, stride], -1 beyond a sequence's blocks
    std::vector<int32_t> hot_ids;  // same shape; empty where nothing is hot
    int64_t stride = 0;
    std::vector<BlockMove> moves;
  };

  std::vector<Sequence*> sequences;
  int num_decode = 0;
  std::vector<int32_t> tokens;        // [num_tokens]
  std::vector<int32_t> positions;     // [num_tokens]
  std::vector<int32_t> cu_seqlens;    // [num_seqs + 1]
  std::vector<int32_t> context_lens;  // [num_seqs]
  std::vector<BlockTables> tables;    // by layer group

  bool empty() const { return sequences.empty(); }
  int num_seqs() const { return static_cast<int>(sequences.size()); }
  int num_tokens() const { return static_cast<int>(tokens.size()); }

  // Appends a sequence's planned tokens (all groups' tables come after, by AddTables).
  void Add(Sequence& sequence);
  // Block tables of one more group, one per sequence; `hot` may be empty.
  void AddTables(const std::vector<std::span<const int32_t>>& cold,
                 const std::vector<std::span<const int32_t>>& hot, std::vector<BlockMove> moves);
  void Clear();

  // One view per group, valid while the batch is unchanged.
  std::vector<BatchView> Views() const;
};

}  // namespace turbomind
