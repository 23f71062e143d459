#pragma once

#include <cstdint>
#include <list>
#include <vector>

namespace turbomind {

// Who uses which block of one pool: ids and reference counts, no memory. One id addresses a
// block's data and its scales, so whatever happens here happens to both.
//
// Invariants:
//  1. Every id in [0, total) is in exactly one state:
//       free    nobody uses it, its bytes mean nothing;
//       cached  nobody uses it, but it is kept (marked with Keep) and can be locked again;
//       active  locked at least once.
//  2. free + cached + active = total.
//  3. Ids that were never handed out are handed out last, in ascending order: memory beyond
//     high_water() has never been touched.
// A kept block may be marked spare: losing it costs little, so spare ones are evicted first.
// Not thread-safe: the engine thread's.
class BlockManager {
 public:
  explicit BlockManager(int64_t total);

  int64_t total() const { return total_; }
  int64_t free() const { return total_ - cached() - active_; }
  int64_t cached() const { return static_cast<int64_t>(plain_.size() + spare_.size()); }
  int64_t active() const { return active_; }
  int64_t high_water() const { return static_cast<int64_t>(blocks_.size()); }

  // A free block, locked once; -1 when there is none (cached ones are not taken).
  int Allocate();
  // One more user. REQUIRES: the block is cached or active.
  void Lock(int id);
  // One user less. The last one's leaving makes the block cached if it is kept, else free.
  // REQUIRES: active.
  void Unlock(int id);
  // Marks a block to be kept when nobody uses it. REQUIRES: active.
  void Keep(int id);
  // Marks a kept block to be evicted before those that are not spare, until it is dropped.
  void MarkSpare(int id);
  // Takes that mark back. REQUIRES: active.
  void ClearSpare(int id);
  // Takes the marks back; a cached block becomes free.
  void Drop(int id);

  // The cached block that was unlocked longest ago, of the spare ones if there are any; -1 when
  // there is none.
  int OldestCached() const;

  int num_users(int id) const { return At(id).num_users; }
  bool is_kept(int id) const { return At(id).kept; }

  // Throws InternalError naming a broken invariant. O(total).
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
  std::vector<Block> blocks_;  // handed out at least once
  std::vector<int> returned_;  // free and handed out before
  // Cached ones, least recently used first.
  std::list<int> plain_;
  std::list<int> spare_;
};

}  // namespace turbomind
