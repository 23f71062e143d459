#pragma once

#include <cstddef>
#include <vector>

namespace turbomind {

// Copies of one block outside the pools, by pool: its data, then its scales. A pool without a copy
// of the block has no bytes. The bytes are those of KvLayerView, so they have a meaning only for a
// cache with the same configuration, scales and K means.
using BlockCopies = std::vector<std::vector<std::byte>>;

}  // namespace turbomind
