#include "turbomind/engine/prefix_exchange.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "turbomind/core/check.h"

namespace turbomind {

int64_t BlocksPerPiece(const KvCache& cache) {
  int64_t bytes = 0;
  for (int pool = 0; pool < cache.num_kv_pools(); ++pool) {
    bytes += cache.bytes_per_block(pool);
  }
  return std::max<int64_t>(kPieceBytes / std::max<int64_t>(bytes, 1), 1);
}

std::vector<BlockCopies> ExportInPieces(const PrefixRange& range, const PrefixPieces& pieces) {
  std::vector<BlockCopies> exported;
  for (bool is_last = false; !is_last;) {
    pieces.run([&](const SequenceManager& manager) {
      const auto begin = range.first + static_cast<int64_t>(exported.size());
      std::vector<BlockCopies> copies =
          manager.ExportBlocks(range.tokens, begin, pieces.blocks, range.salt);
      is_last = static_cast<int64_t>(copies.size()) < pieces.blocks;
      std::ranges::move(copies, std::back_inserter(exported));
    });
  }
  return exported;
}

int64_t ImportInPieces(const PrefixRange& range, std::span<const BlockViews> copies,
                       const PrefixPieces& pieces) {
  const auto num_blocks = static_cast<int64_t>(copies.size());
  int64_t num_entered = 0;
  for (bool is_last = num_blocks == 0; !is_last;) {
    std::string wrong;  // `run` passes on every error as an InternalError
    pieces.run([&](SequenceManager& manager) {
      const int64_t size = std::min(pieces.blocks, num_blocks - num_entered);
      const auto piece =
          copies.subspan(static_cast<size_t>(num_entered), static_cast<size_t>(size));
      try {
        const int64_t entered =
            manager.ImportBlocks(range.tokens, range.first + num_entered, piece, range.salt);
        num_entered += entered;
        is_last = entered < size || num_entered == num_blocks;
      } catch (const InvalidArgument& error) {
        wrong = error.what();
      }
    });
    if (!wrong.empty()) {
      throw InvalidArgument(wrong);
    }
  }
  return num_entered;
}

}  // namespace turbomind
