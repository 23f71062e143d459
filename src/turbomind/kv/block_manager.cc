#include "turbomind/kv/block_manager.h"

#include <limits>
#include <string>

#include "turbomind/core/check.h"

namespace turbomind {

BlockManager::BlockManager(int64_t total) : total_(total) {
  Check(total >= 0 && total <= std::numeric_limits<int32_t>::max(),
        "the number of blocks must be in [0, 2147483647]");
}

const BlockManager::Block& BlockManager::At(int id) const {
  Check(id >= 0 && static_cast<size_t>(id) < blocks_.size(),
        "the block must have been allocated before");
  return blocks_[static_cast<size_t>(id)];
}

BlockManager::Block& BlockManager::At(int id) {
  return const_cast<Block&>(static_cast<const BlockManager*>(this)->At(id));
}

int BlockManager::Allocate() {
  int id = -1;
  if (!returned_.empty()) {
    id = returned_.back();
    returned_.pop_back();
  } else if (high_water() < total_) {
    id = static_cast<int>(high_water());
    blocks_.emplace_back();
  } else {
    return -1;
  }
  At(id).num_users = 1;
  ++active_;
  return id;
}

void BlockManager::Lock(int id) {
  Block& block = At(id);
  Check(block.num_users > 0 || block.kept, "only a cached or active block can be locked");
  if (block.num_users++ == 0) {
    Order(block).erase(block.place);
    ++active_;
  }
}

void BlockManager::Unlock(int id) {
  Block& block = At(id);
  Check(block.num_users > 0, "only an active block can be unlocked");
  if (--block.num_users > 0) {
    return;
  }
  --active_;
  if (block.kept) {
    block.place = Order(block).insert(Order(block).end(), id);
  } else {
    returned_.push_back(id);
  }
}

void BlockManager::Keep(int id) {
  Check(At(id).num_users > 0, "only an active block can be marked as kept");
  At(id).kept = true;
}

void BlockManager::Drop(int id) {
  Block& block = At(id);
  Check(block.kept, "only a kept block can be dropped");
  if (block.num_users == 0) {
    Order(block).erase(block.place);
    returned_.push_back(id);
  }
  block.kept = block.spare = false;
}

void BlockManager::MarkSpare(int id) {
  Block& block = At(id);
  Check(block.kept, "only a kept block can be marked as spare");
  if (block.num_users == 0 && !block.spare) {
    plain_.erase(block.place);
    block.place = spare_.insert(spare_.end(), id);
  }
  block.spare = true;
}

void BlockManager::ClearSpare(int id) {
  Check(At(id).num_users > 0, "only an active block can lose its spare mark");
  At(id).spare = false;
}

int BlockManager::OldestCached() const {
  const std::list<int>& order = spare_.empty() ? plain_ : spare_;
  return order.empty() ? -1 : order.front();
}

void BlockManager::CheckIntegrity() const {
  std::vector<int> places(blocks_.size(), 0);  // number of lists that contain the block
  for (const int id : returned_) {
    Check(At(id).num_users == 0 && !At(id).kept,
          "a free block must have no users and must not be kept");
    ++places[static_cast<size_t>(id)];
  }
  for (const std::list<int>* order : {&plain_, &spare_}) {
    for (const int id : *order) {
      Check(At(id).num_users == 0 && At(id).kept,
            "a cached block must have no users and must be kept");
      Check(At(id).spare == (order == &spare_),
            "a cached block must be in the list that matches its spare mark");
      ++places[static_cast<size_t>(id)];
    }
  }
  int64_t active = 0;
  for (size_t id = 0; id < blocks_.size(); ++id) {
    const bool used = blocks_[id].num_users > 0;
    active += used;
    Check(blocks_[id].kept || !blocks_[id].spare, "a spare block must be kept");
    Check(places[id] + used == 1,
          "a block must be in exactly one of the states free, cached and active");
  }
  const int64_t fresh = total_ - high_water();
  const int64_t counted = fresh + static_cast<int64_t>(returned_.size()) + cached() + active;
  Check(active == active_ && counted == total_, "free + cached + active must equal total");
}

}  // namespace turbomind
