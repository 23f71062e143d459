#include "turbomind/kv/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/kv/codec.h"

namespace turbomind {
namespace {

// REQUIRES: the format of the side has scale bytes.
template <KvCacheMode M>
bool HasLegalScales(const KvLayerView& view, KvSide side) {
  const int count = view.scale_bytes[static_cast<int>(side)];
  for (int row = 0; row < view.kv_heads * view.block_seq_len; ++row) {
    // Heads are contiguous, so all rows of a side have one stride.
    const std::byte* scales =
        view.Scales(side, 0, 0) + static_cast<int64_t>(row) * view.ScaleStride();
    const bool is_legal = std::all_of(scales, scales + count, [](std::byte scale) {
      return IsLegalScale<M>(static_cast<uint8_t>(scale));
    });
    if (!is_legal) {
      return false;
    }
  }
  return true;
}

}  // namespace

KvCache::KvCache(DeviceMemory& device, const KvCacheConfig& config, std::vector<int64_t> num_blocks)
    : device_(device),
      block_seq_len_(config.block_seq_len),
      state_bytes_(config.state_bytes),
      checkpoint_bytes_(config.checkpoint_bytes),
      groups_(MakeLayerGroups(config)),
      has_window16_pools_(HasWindow16(groups_)),
      num_blocks_(std::move(num_blocks)),
      group_of_(config.layers.size(), -1),
      index_in_group_(config.layers.size()),
      global_scales_(2 * config.layers.size()),
      k_means_(config.layers.size()) {
  for (const int64_t bytes : {state_bytes_, checkpoint_bytes_}) {
    Check(bytes >= 0 && bytes % 64 == 0, "a state must be a multiple of 64 bytes");
  }
  Check((state_bytes_ > 0) == (checkpoint_bytes_ > 0), "states must have checkpoints");
  Check(num_pools() == num_kv_pools() + (has_states() ? 2 : 0),
        "every pool must have a number of blocks");
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (size_t i = 0; i < groups_[g].layers.size(); ++i) {
      const auto layer = static_cast<size_t>(groups_[g].layers[i]);
      group_of_[layer] = static_cast<int>(g);
      index_in_group_[layer] = static_cast<int>(i);
    }
  }
  for (int pool = 0; pool < num_pools(); ++pool) {
    CheckNumBlocks(pool);
  }
  try {
    for (int pool = 0; pool < num_pools(); ++pool) {
      const int64_t blocks = this->num_blocks(pool);
      data_.push_back(Reserve(blocks * data_bytes_per_block(pool)));
      scales_.push_back(Reserve(blocks * scale_bytes_per_block(pool)));
    }
  } catch (...) {
    ReleaseAll();
    throw;
  }
}

KvCache::~KvCache() { ReleaseAll(); }

KvCache::Pool KvCache::Reserve(int64_t num_bytes) {
  Pool pool;
  if (num_bytes > 0) {
    pool.memory = static_cast<std::byte*>(device_.Reserve(static_cast<size_t>(num_bytes)));
    pool.num_bytes = num_bytes;
  }
  return pool;
}

void KvCache::ReleaseAll() {
  for (std::vector<Pool>* pools : {&data_, &scales_, &global_scales_, &k_means_}) {
    for (Pool& pool : *pools) {
      if (pool.memory) {
        device_.Release(pool.memory, static_cast<size_t>(pool.num_bytes));
      }
    }
    pools->clear();
  }
}

bool KvCache::IsEmpty(int pool) const {
  return pool >= num_groups() && !IsState(pool) &&
         !groups_[static_cast<size_t>(GroupOfPool(pool))].window16_layout;
}

void KvCache::CheckNumBlocks(int pool) const {
  const int64_t blocks = num_blocks(pool);
  if (IsEmpty(pool)) {
    Check(blocks == 0, "a pool without a layout must have no blocks");
    return;
  }
  const int64_t min_blocks = has_states() && pool == CheckpointPool() ? 0 : 1;
  if (blocks < min_blocks || blocks > std::numeric_limits<int32_t>::max()) {
    throw InvalidArgument("The KV cache would have " + std::to_string(blocks) +
                          " blocks in a pool, but needs " + std::to_string(min_blocks) +
                          " to 2147483647. Change cache_max_entry_count.");
  }
}

const block::Layout& KvCache::PoolLayout(int pool) const {
  Check(pool >= 0 && pool < num_kv_pools() && !IsEmpty(pool), "the KV pool must exist");
  const LayerGroup& group = groups_[static_cast<size_t>(GroupOfPool(pool))];
  return pool < num_groups() ? group.layout : *group.window16_layout;
}

StateView KvCache::WholeSlots(int pool) const {
  return pool < 0 ? StateView()
                  : StateView{data_[static_cast<size_t>(pool)].memory, SlotBytes(pool)};
}

void KvCache::CheckId(int pool, int64_t block) const {
  Check(pool >= 0 && pool < num_pools(), "the pool must exist");
  Check(block >= 0 && block < num_blocks_[static_cast<size_t>(pool)], "the block must exist");
}

int KvCache::GroupOf(int layer) const { return group_of_.at(static_cast<size_t>(layer)); }

int64_t KvCache::num_blocks(int pool) const { return num_blocks_.at(static_cast<size_t>(pool)); }

int64_t KvCache::data_bytes_per_block(int pool) const {
  if (IsState(pool)) {
    return SlotBytes(pool);
  }
  return IsEmpty(pool) ? 0 : PoolLayout(pool).block_bytes();
}

int64_t KvCache::scale_bytes_per_block(int pool) const {
  return IsState(pool) || IsEmpty(pool) ? 0 : PoolLayout(pool).scale_block_bytes();
}

int64_t KvCache::data_bytes(int pool) const {
  return data_.at(static_cast<size_t>(pool)).num_bytes;
}

int64_t KvCache::scale_bytes(int pool) const {
  return scales_.at(static_cast<size_t>(pool)).num_bytes;
}

int64_t KvCache::reserved_bytes() const {
  int64_t sum = 0;
  for (int pool = 0; pool < num_pools(); ++pool) {
    sum += data_bytes(pool) + scale_bytes(pool);
  }
  return sum;
}

KvLayerView KvCache::LayerView(int layer) const {
  const auto l = static_cast<size_t>(layer);
  const auto g = static_cast<size_t>(GroupOf(layer));
  KvLayerView view =
      groups_[g].layout.LayerView(index_in_group_[l], data_[g].memory, scales_[g].memory);
  for (size_t side = 0; side < 2; ++side) {
    view.global_scale[side] = reinterpret_cast<const float*>(global_scales_[2 * l + side].memory);
  }
  return view;
}

KvLayerView KvCache::Window16LayerView(int layer) const {
  const auto l = static_cast<size_t>(layer);
  const int group = GroupOf(layer);
  const int pool = Window16Pool(group);
  if (!has_window16_pools() || IsEmpty(pool)) {
    return {};
  }
  return PoolLayout(pool).LayerView(index_in_group_[l], data_[static_cast<size_t>(pool)].memory,
                                    nullptr);
}

std::byte* KvCache::GetBlockPtr(int pool, int64_t block) const {
  CheckId(pool, block);
  return data_[static_cast<size_t>(pool)].memory + block * data_bytes_per_block(pool);
}

std::byte* KvCache::GetScaleBlockPtr(int pool, int64_t block) const {
  CheckId(pool, block);
  std::byte* memory = scales_[static_cast<size_t>(pool)].memory;
  return memory ? memory + block * scale_bytes_per_block(pool) : nullptr;
}

BlockCopy KvCache::ReadBlock(int pool, int64_t block) const {
  BlockCopy bytes(static_cast<size_t>(bytes_per_block(pool)));
  const auto data_bytes = static_cast<size_t>(data_bytes_per_block(pool));
  device_.Copy(bytes.data(), GetBlockPtr(pool, block), data_bytes);
  if (bytes.size() > data_bytes) {
    device_.Copy(bytes.data() + data_bytes, GetScaleBlockPtr(pool, block),
                 bytes.size() - data_bytes);
  }
  device_.Synchronize();
  return bytes;
}

void KvCache::WriteBlock(int pool, int64_t block, std::span<const std::byte> bytes) {
  Check(static_cast<int64_t>(bytes.size()) == bytes_per_block(pool),
        "a written block must have the size of the pool's blocks");
  const auto data_bytes = static_cast<size_t>(data_bytes_per_block(pool));
  device_.Copy(GetBlockPtr(pool, block), bytes.data(), data_bytes);
  if (bytes.size() > data_bytes) {
    device_.Copy(GetScaleBlockPtr(pool, block), bytes.data() + data_bytes,
                 bytes.size() - data_bytes);
  }
  device_.Synchronize();
}

const block::Config& KvCache::ShapeOf(int layer, const std::string& what) const {
  if (layer < 0 || static_cast<size_t>(layer) >= group_of_.size()) {
    throw InvalidArgument(what + " cannot be set. The layer must be below " +
                          std::to_string(group_of_.size()));
  }
  if (GroupOf(layer) < 0) {
    throw InvalidArgument(what + " cannot be set. The layer has no K and V of its own.");
  }
  return groups_[static_cast<size_t>(GroupOf(layer))].layout.config();
}

void KvCache::SetGlobalScales(int layer, KvSide side, const std::vector<float>& scales) {
  const std::string what = "KV cache scales of layer " + std::to_string(layer);
  const int kv_heads = ShapeOf(layer, what).kv_heads;
  if (scales.size() != static_cast<size_t>(kv_heads)) {
    throw InvalidArgument(what + " have " + std::to_string(scales.size()) + " values, but need " +
                          std::to_string(kv_heads) + ", one per KV head.");
  }
  for (const float scale : scales) {
    // The condition also rejects NaN. Within this range scale * factor stays a normal number.
    if (!(scale >= std::ldexp(1.f, -64) && scale <= std::ldexp(1.f, 64))) {
      throw InvalidArgument(what + " contain " + std::to_string(scale) +
                            ", but must be in [2^-64, 2^64].");
    }
  }
  const size_t num_bytes = scales.size() * sizeof(float);
  Pool& pool = global_scales_[2 * static_cast<size_t>(layer) + static_cast<size_t>(side)];
  if (!pool.memory) {
    pool = Reserve(static_cast<int64_t>(num_bytes));
  }
  device_.Copy(pool.memory, scales.data(), num_bytes);
  device_.Synchronize();
}

void KvCache::SetKMean(int layer, const std::vector<float>& mean) {
  const std::string what = "The K mean of layer " + std::to_string(layer);
  const block::Config& shape = ShapeOf(layer, what);
  const size_t wanted = static_cast<size_t>(shape.kv_heads) * static_cast<size_t>(shape.head_dim);
  if (mean.size() != wanted) {
    throw InvalidArgument(what + " has " + std::to_string(mean.size()) + " values, but needs " +
                          std::to_string(wanted) + ", the number of KV heads times head_dim.");
  }
  if (!std::all_of(mean.begin(), mean.end(), [](float x) { return std::isfinite(x); })) {
    throw InvalidArgument(what + " has a value that is not finite. Use finite values.");
  }
  const size_t num_bytes = mean.size() * sizeof(float);
  Pool& pool = k_means_[static_cast<size_t>(layer)];
  if (!pool.memory) {
    pool = Reserve(static_cast<int64_t>(num_bytes));
  }
  device_.Copy(pool.memory, mean.data(), num_bytes);
  device_.Synchronize();
}

const float* KvCache::KMean(int layer) const {
  return reinterpret_cast<const float*>(k_means_.at(static_cast<size_t>(layer)).memory);
}

void KvCache::CheckScaleBytes(int pool, int64_t block) const {
  if (scale_bytes_per_block(pool) == 0) {
    return;
  }
  const block::Layout& layout = PoolLayout(pool);
  std::vector<std::byte> bytes(static_cast<size_t>(layout.scale_block_bytes()));
  device_.Copy(bytes.data(), GetScaleBlockPtr(pool, block), bytes.size());
  device_.Synchronize();
  const int num_layers = static_cast<int>(layout.config().layers.size());
  for (int layer = 0; layer < num_layers; ++layer) {
    const KvLayerView view = layout.LayerView(layer, nullptr, bytes.data());
    for (const KvSide side : {KvSide::kK, KvSide::kV}) {
      const int s = static_cast<int>(side);
      if (view.scale_bytes[s] == 0) {
        continue;
      }
      const bool is_legal = DispatchFormat(view.format[s], [&]<KvCacheMode M>() {
        if constexpr (Codec<M>::kHasScales) {
          return HasLegalScales<M>(view, side);
        }
        return true;
      });
      Check(is_legal, "every stored scale byte must be one that the encoder can store");
    }
  }
}

}  // namespace turbomind
