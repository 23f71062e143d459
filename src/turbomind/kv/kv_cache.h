#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "turbomind/core/device_memory.h"
#include "turbomind/kv/block_copies.h"
#include "turbomind/kv/layer_group.h"
#include "turbomind/kv/state_view.h"

namespace turbomind {

// Owns the memory of the pools. It is reserved at construction and touched as blocks are used.
// SequenceManager tracks the users of each block. Only the engine thread may use it; kernels read
// it through LayerView.
//
// A *pool* holds blocks of one layer group. Each block has data and, for FP4, scales under one id.
// Pools [0, num_groups) are the quantized pools, in the layers' KV formats. With a 16-bit window,
// pools [num_groups, 2 · num_groups) are the 16-bit pools of the same groups. The 16-bit pool of a
// group without 16-bit blocks is empty. These are the KV pools.
//
// With recurrent layers, two pools of states follow. A block of them is the state of all recurrent
// layers of one sequence (ops/recurrent_params.h). The first pool has the *working states* of
// running sequences, and those that a step saves; the second one the *checkpoints*: copies of the
// state after the last token of a block, maybe with fewer bits. It may be empty.
class KvCache {
 public:
  // num_blocks: one number per pool, states included. `device` must outlive the cache.
  KvCache(DeviceMemory& device, const KvCacheConfig& config, std::vector<int64_t> num_blocks);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const std::vector<LayerGroup>& groups() const { return groups_; }
  int num_groups() const { return static_cast<int>(groups_.size()); }
  int num_pools() const { return static_cast<int>(num_blocks_.size()); }
  int num_kv_pools() const { return num_groups() * (has_window16_pools_ ? 2 : 1); }
  bool has_window16_pools() const { return has_window16_pools_; }
  int Window16Pool(int group) const { return num_groups() + group; }
  // Returns the group of a KV pool.
  int GroupOfPool(int pool) const { return pool % num_groups(); }
  bool has_states() const { return state_bytes_ > 0; }
  int StatePool() const { return has_states() ? num_kv_pools() : -1; }
  int CheckpointPool() const { return has_states() ? num_kv_pools() + 1 : -1; }
  // Returns the group of a model layer, or -1 if the layer has no attention.
  int GroupOf(int layer) const;
  // REQUIRES: the layer has attention, as for every view of its K and V.
  const PrecisionWindow& rule(int layer) const {
    return groups_[static_cast<size_t>(GroupOf(layer))].rule;
  }
  int block_seq_len() const { return block_seq_len_; }
  int64_t num_blocks(int pool) const;
  int64_t data_bytes_per_block(int pool) const;
  int64_t scale_bytes_per_block(int pool) const;  // 0 without FP4
  int64_t bytes_per_block(int pool) const {
    return data_bytes_per_block(pool) + scale_bytes_per_block(pool);
  }
  int64_t data_bytes(int pool) const;
  int64_t scale_bytes(int pool) const;  // 0 without FP4
  int64_t reserved_bytes() const;       // sum over all pools

  // Returns the kernels' view of a model layer. It is valid for the lifetime of the cache.
  KvLayerView LayerView(int layer) const;
  KvLayerView Window16LayerView(int layer) const;  // data is null if there is no 16-bit window
  // Return the whole slots of the working states and of the checkpoints. Without recurrent layers,
  // and without checkpoints, data is null.
  StateView states() const { return WholeSlots(StatePool()); }
  StateView checkpoints() const { return WholeSlots(CheckpointPool()); }

  std::byte* GetBlockPtr(int pool, int64_t block) const;
  std::byte* GetScaleBlockPtr(int pool, int64_t block) const;  // null without FP4

  // Returns the data of a block, then its scales: bytes_per_block(pool) bytes.
  BlockCopy ReadBlock(int pool, int64_t block) const;
  // Writes what ReadBlock returned. REQUIRES: bytes.size() == bytes_per_block(pool).
  void WriteBlock(int pool, int64_t block, std::span<const std::byte> bytes);

  // Sets the constant FP32 global_scale of NVFP4 or k_scale / v_scale of FP8: one per KV head,
  // finite and in [2^-64, 2^64]. REQUIRES: nothing was written to the layer yet. Throws
  // InvalidArgument.
  void SetGlobalScales(int layer, KvSide side, const std::vector<float>& scales);
  // Sets the constant that is subtracted from K before it is stored, in every pool: [kv_heads,
  // head_dim], finite. REQUIRES: nothing was written to the layer yet. Throws InvalidArgument.
  void SetKMean(int layer, const std::vector<float>& mean);
  const float* KMean(int layer) const;  // null if no K mean was set

  // Throws InternalError if a scale byte of the block is one that no encoder stores. REQUIRES: all
  // slots of the block are written.
  void CheckScaleBytes(int pool, int64_t block) const;

 private:
  struct Pool {
    std::byte* memory = nullptr;
    int64_t num_bytes = 0;
  };
  Pool Reserve(int64_t num_bytes);
  void ReleaseAll();
  bool IsState(int pool) const { return pool >= num_kv_pools(); }
  bool IsEmpty(int pool) const;  // whether a KV pool has no blocks by design
  void CheckNumBlocks(int pool) const;
  const block::Layout& PoolLayout(int pool) const;
  int64_t SlotBytes(int pool) const {
    return pool == StatePool() ? state_bytes_ : checkpoint_bytes_;
  }
  StateView WholeSlots(int pool) const;
  void CheckId(int pool, int64_t block) const;
  // Returns the shape of a layer with K and V. Throws InvalidArgument that begins with `what` for
  // another layer.
  const block::Config& ShapeOf(int layer, const std::string& what) const;

  DeviceMemory& device_;
  int block_seq_len_;
  int64_t state_bytes_;
  int64_t checkpoint_bytes_;
  std::vector<LayerGroup> groups_;
  bool has_window16_pools_;
  std::vector<int64_t> num_blocks_;
  std::vector<int> group_of_;        // by model layer; -1 without attention
  std::vector<int> index_in_group_;  // by model layer
  std::vector<Pool> data_;           // by pool
  std::vector<Pool> scales_;         // by pool
  std::vector<Pool> global_scales_;  // by 2 * layer + side; empty means 1.0
  std::vector<Pool> k_means_;        // by model layer; empty if not set
};

}  // namespace turbomind
