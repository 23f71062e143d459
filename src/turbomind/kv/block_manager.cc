#include "turbomind/kv/block_manager.h"

#include <limits>
#include <string>

#include "turbomind/core/check.h"

namespace turbomind {

BlockManager::BlockManager(int64_t total) : total_(total) {
  Check(total >= 0 && total <= std::numeric_limits<int32_t>::max(), "the ids fit into int32");
}

const BlockManager::Block& BlockManager::At(int id) const {
  Check(id >= 0 && static_cast<size_t>(id) < blocks_.size(), "the block was handed out");
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
  Check(block.num_users > 0 || block.kept, "a locked block is cached or active");
  if (block.num_users++ == 0) {
    Order(block).erase(block.place);
    ++active_;
  }
}

void BlockManager::Unlock(int id) {
  Block& block = At(id);
  Check(block.num_users > 0, "an unlocked block is active");
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
  Check(At(id).num_users > 0, "a block that becomes kept is active");
  At(id).kept = true;
}

void BlockManager::Drop(int id) {
  Block& block = At(id);
  Check(block.kept, "a dropped block is kept");
  if (block.num_users == 0) {
    Order(block).erase(block.place);
    returned_.push_back(id);
  }
  block.kept = block.spare = false;
}

void BlockManager::MarkSpare(int id) {
  Block& block = At(id);
  Check(block.kept, "a spare block is kept");
  if (block.num_users == 0 && !block.spare) {
    plain_.erase(block.place);
    block.place = spare_.insert(spare_.end(), id);
  }
  block.spare = true;
}

void BlockManager::ClearSpare(int id) {
  Check(At(id).num_users > 0, "a block that becomes plain is active");
  At(id).spare = false;
}

int BlockManager::OldestCached() const {
  const std::list<int>& order = spare_.empty() ? plain_ : spare_;
  return order.empty() ? -1 : order.front();
}

void BlockManager::CheckIntegrity() const {
  std::vector<int> places(blocks_.size(), 0);  // lists that a block is in
  for (const int id : returned_) {
    Check(At(id).num_users == 0 && !At(id).kept, "a free block has no users and is not kept");
    ++places[static_cast<size_t>(id)];
  }
  for (const std::list<int>* order : {&plain_, &spare_}) {
    for (const int id : *order) {
      Check(At(id).num_users == 0 && At(id).kept, "a cached block has no users and is kept");
      Check(At(id).spare == (order == &spare_), "a cached block is in the list of its kind");
      ++places[static_cast<size_t>(id)];
    }
  }
  int64_t active = 0;
  for (size_t id = 0; id < blocks_.size(); ++id) {
    const bool used = blocks_[id].num_users > 0;
    active += used;
    Check(blocks_[id].kept || !blocks_[id].spare, "a spare block is kept");
    Check(places[id] + used == 1, "a block is in exactly one of free, cached, active");
  }
  const int64_t fresh = total_ - high_water();
  const int64_t counted = fresh + static_cast<int64_t>(returned_.size()) + cached() + active;
  Check(active == active_ && counted == total_, "free + cached + active = total");
}

}  // namespace turbomind
