#pragma once

#include <cstdint>
#include <list>
#include <vector>

namespace turbomind {

// Tracks the users of each block of one pool. It stores ids and reference counts, no memory. One
// id addresses a block's data and its scales, so every operation applies to both.
//
// Invariants:
//  1. Every id in [0, total) is in exactly one state:
//       free    no users; the contents are undefined;
//       cached  no users, but the block is kept (see Keep) and can be locked again;
//       active  locked at least once.
//  2. free + cached + active = total.
//  3. Ids that were never allocated are allocated last, in ascending order. Memory beyond
//     high_water() has therefore never been touched.
// A kept block may be marked spare if losing it costs little. Spare blocks are evicted first.
// Not thread-safe: only the engine thread may use it.
class BlockManager {
 public:
  explicit BlockManager(int64_t total);

  int64_t total() const { return total_; }
  int64_t free() const { return total_ - cached() - active_; }
  int64_t cached() const { return static_cast<int64_t>(plain_.size() + spare_.size()); }
  int64_t active() const { return active_; }
  int64_t high_water() const { return static_cast<int64_t>(blocks_.size()); }

  // Allocates a free block and locks it once. Returns -1 if no block is free; cached blocks are not
  // evicted.
  int Allocate();
  // Adds a user. REQUIRES: the block is cached or active.
  void Lock(int id);
  // Removes a user. After the last one, the block becomes cached if it is kept, and free otherwise.
  // REQUIRES: active.
  void Unlock(int id);
  // Marks a block to be kept when it has no users. REQUIRES: active.
  void Keep(int id);
  // Marks a kept block to be evicted before blocks that are not spare. Drop removes the mark.
  void MarkSpare(int id);
  // Removes the spare mark. REQUIRES: active.
  void ClearSpare(int id);
  // Removes both marks. A cached block becomes free.
  void Drop(int id);

  // Returns the cached block that was unlocked longest ago, or -1 if no block is cached. Spare
  // blocks come first.
  int OldestCached() const;

  int num_users(int id) const { return At(id).num_users; }
  bool is_kept(int id) const { return At(id).kept; }
  bool is_spare(int id) const { return At(id).spare; }

  // Throws InternalError that names the broken invariant. O(total).
  void CheckIntegrity() const;

 private:
  struct Block {
    int num_users = 0;
    bool kept = false;
    bool spare = false;
    std::list<int>::iterator place;  // in Order(*this), while cached
  };
  const Block& At(int id) const;
  Block& At(int id);
  std::list<int>& Order(const Block& block) { return block.spare ? spare_ : plain_; }

  int64_t total_;
  int64_t active_ = 0;
  std::vector<Block> blocks_;  // allocated at least once
  std::vector<int> returned_;  // free, but allocated before
  // Cached blocks, least recently used first.
  std::list<int> plain_;
  std::list<int> spare_;
};

}  // namespace turbomind
