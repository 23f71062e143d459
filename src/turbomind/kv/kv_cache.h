#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/core/device_memory.h"
#include "turbomind/kv/layer_group.h"

namespace turbomind {

// The pools' memory, reserved at once, touched as blocks are used. Who uses which block is
// SequenceManager's business. Engine thread; kernels read it through LayerView.
//
// A *pool* holds blocks of one layer group, each with data and scales (none without FP4) under one
// id. Pools [0, num_groups) are the quantized ones, in the layers' formats; where there is a 16-bit
// window, pools [num_groups, 2 · num_groups) are the 16-bit ones of the same groups, empty where a
// group has no 16-bit blocks.
class KvCache {
 public:
  // num_blocks: one per pool of MakeLayerGroups(config). `device` must outlive the cache.
  KvCache(DeviceMemory& device, const KvCacheConfig& config, std::vector<int64_t> num_blocks);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const std::vector<LayerGroup>& groups() const { return groups_; }
  int num_groups() const { return static_cast<int>(groups_.size()); }
  int num_pools() const { return static_cast<int>(num_blocks_.size()); }
  bool has_window16_pools() const { return num_pools() > num_groups(); }
  int Window16Pool(int group) const { return num_groups() + group; }
  int GroupOf(int layer) const;  // of a model layer
  const PrecisionWindow& rule(int layer) const {
    return groups_[static_cast<size_t>(GroupOf(layer))].rule;
  }
  int block_seq_len() const { return block_seq_len_; }
  int64_t num_blocks(int pool) const;
  int64_t bytes_per_block(int pool) const;
  int64_t data_bytes(int pool) const;
  int64_t scale_bytes(int pool) const;  // 0 without FP4
  int64_t reserved_bytes() const;       // all pools

  // What kernels see of a model layer; valid as long as the cache.
  KvLayerView LayerView(int layer) const;
  KvLayerView Window16LayerView(int layer) const;  // data null where there is no 16-bit window

  std::byte* GetBlockPtr(int pool, int64_t block) const;
  std::byte* GetScaleBlockPtr(int pool, int64_t block) const;  // null without FP4

  // The constant FP32 factor of FP8 and NVFP4: one per kv head, finite and in [2^-64, 2^64].
  // REQUIRES: before the first write to the layer. Throws InvalidArgument.
  void SetGlobalScales(int layer, KvSide side, const std::vector<float>& scales);
  // The constant that K loses before it is stored, in every pool: [kv_heads, head_dim], finite.
  // REQUIRES: before the first write to the layer. Throws InvalidArgument.
  void SetKMean(int layer, const std::vector<float>& mean);
  const float* KMean(int layer) const;  // null: none

  // Throws InternalError when a scale byte of a block whose slots are all written is one that no
  // encoder stores.
  void CheckScaleBytes(int pool, int64_t block) const;

 private:
  struct Pool {
    std::byte* memory = nullptr;
    int64_t num_bytes = 0;
  };
  Pool Reserve(int64_t num_bytes);
  void ReleaseAll();
  bool IsEmpty(int pool) const;
  const block::Layout& PoolLayout(int pool) const;
  void CheckId(int pool, int64_t block) const;

  DeviceMemory& device_;
  int block_seq_len_;
  int kv_heads_;
  std::vector<LayerGroup> groups_;
  std::vector<int64_t> num_blocks_;
  std::vector<int> group_of_;        // by model layer
  std::vector<int> index_in_group_;  // by model layer
  std::vector<Pool> data_;           // by pool
  std::vector<Pool> scales_;         // by pool
  std::vector<Pool> global_scales_;  // by 2 * layer + side; empty: 1.0
  std::vector<Pool> k_means_;        // by model layer; empty: none
};

}  // namespace turbomind
