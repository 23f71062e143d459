#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "turbomind/core/device.h"
#include "turbomind/kv/hot_rule.h"
#include "turbomind/kv/layout.h"

namespace turbomind {

// What the cache stores, by model layer.
struct KvCacheConfig {
  std::vector<block::Config::LayerModes> layers;
  std::vector<int> windows;  // 0: full attention. Same length as layers
  int kv_heads = 0;
  int head_dim = 0;
  int block_seq_len = 64;
  DataType dtype = DataType::kBFloat16;
  HotTokens hot;  // off unless set
};

// Every layer with the same mode for K and V.
KvCacheConfig MakeKvCacheConfig(const std::vector<int>& windows, KvCacheMode mode, int kv_heads,
                                int head_dim, int block_seq_len, DataType dtype);

// The layers that share block ids: full attention, or one sliding window length.
struct LayerGroup {
  int window = 0;                           // 0: full attention
  std::vector<int> layers;                  // model layers, ascending
  block::Layout layout;                     // of the cold pool
  std::optional<block::Layout> hot_layout;  // the same layers in mode none; empty: nothing is hot
  HotRule rule;

  int64_t bytes_per_block() const { return layout.block_bytes() + layout.scale_block_bytes(); }
  int64_t hot_bytes_per_block() const { return hot_layout ? hot_layout->block_bytes() : 0; }
  // Cold blocks that a sequence of `num_tokens` needs, while at most `chunk` tokens are added at
  // once: all its blocks, or those of its window, without the sinks.
  int64_t BlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // Hot blocks, while at most `chunk` tokens are added at once (1: decode): sinks, the recent ones,
  // the one that is being quantised, and those of the chunk. 0 where nothing is hot.
  int64_t HotBlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // First block of a sequence that a query at `position`, or any later one, can see.
  int64_t FirstVisibleBlock(int64_t position) const;
};

// Full attention first, then windows in ascending order. Throws InvalidArgument for negative
// windows and whatever block::Layout refuses.
std::vector<LayerGroup> MakeLayerGroups(const KvCacheConfig& config);

// How long and how many sequences are; what a budget is shared by.
struct KvDemand {
  int64_t session_len = 0;
  int64_t chunk = 0;          // new tokens of one step at most
  int64_t max_sequences = 0;  // never more blocks than these need; 0: no such limit
};

// Blocks of each pool (below) for a budget in bytes: shared so that the same number of sequences of
// session_len fits in every pool, chunk blocks of the hot pools counted once and not per sequence.
// The hot pools have room for max_sequences short sequences too, as far as a quarter of the budget
// goes. One pool: floor(budget / bytes_per_block). Computed before anything is allocated; a pool
// may get 0.
std::vector<int64_t> BlocksForBudget(const std::vector<LayerGroup>& groups, int64_t budget_bytes,
                                     const KvDemand& demand);
// The same for a given number of cold blocks of the first group (full attention, where there is
// one); the hot pools come on top.
std::vector<int64_t> BlocksForCount(const std::vector<LayerGroup>& groups, int64_t num_blocks,
                                    const KvDemand& demand);

// The pools' memory, reserved at once, touched as blocks are used. Who uses which block is
// SequenceManager's business. Engine thread; kernels read it through LayerView.
//
// A *pool* holds blocks of one layer group, each with data and scales (none without FP4) under one
// id. Pools [0, num_groups) are the cold ones, in the layers' formats; where blocks are hot, pools
// [num_groups, 2 · num_groups) are the 16-bit ones of the same groups.
class KvCache {
 public:
  // num_blocks: one per pool of MakeLayerGroups(config). `device` must outlive the cache.
  KvCache(Device& device, const KvCacheConfig& config, std::vector<int64_t> num_blocks);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const std::vector<LayerGroup>& groups() const { return groups_; }
  int num_groups() const { return static_cast<int>(groups_.size()); }
  int num_pools() const { return static_cast<int>(num_blocks_.size()); }
  bool has_hot_pools() const { return num_pools() > num_groups(); }
  int HotPool(int group) const { return num_groups() + group; }
  int GroupOf(int layer) const;  // of a model layer
  const HotRule& rule() const { return groups_.front().rule; }
  int block_seq_len() const { return block_seq_len_; }
  int64_t num_blocks(int pool) const;
  int64_t bytes_per_block(int pool) const;
  int64_t data_bytes(int pool) const;
  int64_t scale_bytes(int pool) const;  // 0 without FP4
  int64_t reserved_bytes() const;       // all pools

  // What kernels see of a model layer; valid as long as the cache.
  KvLayerView LayerView(int layer) const;
  KvLayerView HotLayerView(int layer) const;  // data null where nothing is hot

  std::byte* GetBlockPtr(int pool, int64_t block) const;
  std::byte* GetScaleBlockPtr(int pool, int64_t block) const;  // null without FP4

  // Copies a block's data and scales inside a pool.
  void CopyBlock(int pool, int64_t to, int64_t from);

  // The constant FP32 factor of FP8 and NVFP4: one per kv head, finite and in [2^-64, 2^64].
  // REQUIRES: before the first write to the layer. Throws InvalidArgument.
  void SetFactors(int layer, KvSide side, const std::vector<float>& factors);
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
  const block::Layout& PoolLayout(int pool) const;
  void CheckId(int pool, int64_t block) const;

  Device& device_;
  int block_seq_len_;
  int kv_heads_;
  std::vector<LayerGroup> groups_;
  std::vector<int64_t> num_blocks_;
  std::vector<int> group_of_;        // by model layer
  std::vector<int> index_in_group_;  // by model layer
  std::vector<Pool> data_;           // by pool
  std::vector<Pool> scales_;         // by pool
  std::vector<Pool> factors_;        // by 2 * layer + side; empty: 1.0
  std::vector<Pool> k_means_;        // by model layer; empty: none
};

}  // namespace turbomind
