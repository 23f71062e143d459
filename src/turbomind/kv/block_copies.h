#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace turbomind {

// Leaves new elements of a vector uninitialized, because they are overwritten at once.
template <class T>
struct UninitializedAllocator : std::allocator<T> {
  static_assert(std::is_trivially_default_constructible_v<T>);
  template <class U>
  struct rebind {
    using other = UninitializedAllocator<U>;
  };
  template <class... Args>
  void construct(T* place, Args&&... args) {
    if constexpr (sizeof...(Args) > 0) {
      std::construct_at(place, std::forward<Args>(args)...);
    }
  }
};

using BlockCopy = std::vector<std::byte, UninitializedAllocator<std::byte>>;

// Copies of one block outside the pools, by pool: its data, then its scales. A pool without a copy
// of the block has no bytes. The bytes are those of KvLayerView, so they have a meaning only for a
// cache with the same configuration, scales and K means.
using BlockCopies = std::vector<BlockCopy>;

// The same copies where they are.
using BlockViews = std::vector<std::span<const std::byte>>;

}  // namespace turbomind
