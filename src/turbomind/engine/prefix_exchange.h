#pragma once

// Copies cached prefixes out of and into a running engine, in pieces that delay a step little.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "turbomind/kv/sequence_manager.h"

namespace turbomind {

// A copy to new memory runs at about 1 GB/s, so a piece takes 2 ms.
inline constexpr int64_t kPieceBytes = int64_t{2} << 20;

// Blocks of the tokens from block `first` on.
struct PrefixRange {
  std::span<const int32_t> tokens;
  int64_t first = 0;
  CacheSalt salt = {};
};

// How pieces are copied. `run` calls its argument on the engine thread, between two steps, and
// throws InternalError if that throws.
struct PrefixPieces {
  int64_t blocks = 1;  // per piece
  std::function<void(const std::function<void(SequenceManager&)>&)> run;
};

// Returns the number of blocks that kPieceBytes hold in all KV pools, at least one. Few blocks have
// a checkpoint, which comes on top.
int64_t BlocksPerPiece(const KvCache& cache);

// Returns copies of the blocks, as far as they are cached.
std::vector<BlockCopies> ExportInPieces(const PrefixRange& range, const PrefixPieces& pieces);

// Enters copies of the blocks. SequenceManager::ImportBlocks documents the result and the errors.
int64_t ImportInPieces(const PrefixRange& range, std::span<const BlockViews> copies,
                       const PrefixPieces& pieces);

}  // namespace turbomind
