#pragma once

// Rows that move between a paged cache and dense tensors, and the place of each of them, for host
// and device. The cache may be another program's, with any strides.
//
// libkvx (components/kvx) makes these structs from its descriptors. It moves the rows of host
// memory itself, and the CUDA library those of GPU memory. Both compute places with the functions
// here. No function reads memory, so that the caller decides how an array is read and what a bad
// entry means.

#include <cstddef>
#include <cstdint>

#include "turbomind/core/float_convert.h"
#include "turbomind/core/host_device.h"

namespace turbomind {

// The numbers are those of KVX's dtypes.
enum class RowType : int32_t { kF16 = 1, kBF16 = 2, kF32 = 3, kE4M3 = 4, kE5M2 = 5 };

TM_HD bool IsFp8(RowType type) { return type == RowType::kE4M3 || type == RowType::kE5M2; }
TM_HD int BytesOf(RowType type) { return IsFp8(type) ? 1 : (type == RowType::kF32 ? 4 : 2); }

// The counts of a cache, all positive and below 2^32. The product of the first two fits.
struct PagedShape {
  int64_t blocks = 0;
  int64_t block_size = 0;  // tokens of a block
  int64_t heads = 0;
  int64_t head_dim = 0;

  TM_HD int64_t num_slots() const { return blocks * block_size; }
};

// K or V of a cache. All strides are in bytes. A row of head_dim values is split into chunks of
// `pack` values that are `value` bytes apart. Most layouts have one chunk.
struct PagedView {
  std::byte* base = nullptr;
  int64_t block = 0;
  int64_t token = 0;
  int64_t head = 0;
  int64_t chunk = 0;
  int64_t value = 0;
  uint32_t pack = 1;

  // Returns the distance of value d from the first value of its row.
  TM_HD int64_t ValueOffset(uint32_t d) const {
    return int64_t{d / pack} * chunk + int64_t{d % pack} * value;
  }
};

// FP32 scales by block and head, with strides in bytes. `data` null means 1.
struct RowScales {
  const std::byte* data = nullptr;
  int64_t block = 0;
  int64_t head = 0;

  TM_HD const std::byte* At(int64_t block_id, int64_t head_id) const {
    return data + block_id * block + head_id * head;
  }
};

// Returns whether a code can be divided by the scale.
TM_HD bool IsValidScale(float scale) { return IsFinite(scale) && scale > 0.f; }

// K or V of a transfer: dense rows [rows, heads, head_dim] beside the cache. Codes of FP8 are moved
// as they are, or made from floats with the scales.
struct TransferSide {
  PagedView cache;
  RowType cache_type = RowType::kF32;
  std::byte* rows = nullptr;
  RowType row_type = RowType::kF32;
  RowScales scales;
};

// An array of integers with 32 or 64 bits.
struct IndexArray {
  const void* data = nullptr;
  bool is_wide = false;
};

struct SlotPlace {
  int64_t block = 0;
  int64_t offset = 0;  // token in the block
};

// The slot of each row of a write.
struct SlotMap {
  IndexArray slots;
  int64_t invalid = -1;

  TM_HD bool IsUsed(int64_t slot) const { return slot >= 0 && slot != invalid; }
};

// Divides by the size of a block. Quotients of 32 bits are much faster on a GPU.
TM_HD SlotPlace PlaceOf(int64_t slot, int64_t block_size) {
  if (slot >> 32 == 0) {
    const auto low = static_cast<uint32_t>(slot);
    const auto size = static_cast<uint32_t>(block_size);
    return {low / size, low % size};
  }
  return {slot / block_size, slot % block_size};
}

struct RowWrite {
  PagedShape shape;
  TransferSide sides[2];  // K, V
  SlotMap slots;
  int64_t num_rows = 0;
};

enum class TableFormat : int32_t { kPacked = 1, kRagged = 2, kOffsets = 3 };  // KVX's numbers

// The blocks of the tokens of sequences. An entry of a ragged table is the block of one token, any
// other one that of block_size tokens.
struct TableMap {
  IndexArray indices;
  IndexArray indptr;  // of a ragged table
  IndexArray lengths;
  TableFormat format = TableFormat::kPacked;
  int64_t num_seqs = 0;
  int64_t max_seq_len = 0;
  int64_t max_blocks_per_seq = 0;
  int64_t num_indices = 0;

  TM_HD bool is_ragged() const { return format == TableFormat::kRagged; }
  // Returns the tokens of a sequence that are read. Not positive if there are none.
  TM_HD int64_t NumTokens(int64_t length) const {
    return length < max_seq_len ? length : max_seq_len;
  }
  // Returns the index of the sequence's first entry. Of a ragged table, it is in indptr.
  TM_HD int64_t FirstEntry(int side, int64_t seq) const {
    return (format == TableFormat::kOffsets ? 2 * seq + side : seq) * max_blocks_per_seq;
  }
};

// The memory of the blocks of a table with offsets.
struct BlockPools {
  const std::byte* primary = nullptr;
  const std::byte* secondary = nullptr;  // or null
  int64_t bytes_per_block = 0;
};

struct RowGather {
  PagedShape shape;
  TransferSide sides[2];  // K, V
  TableMap table;
  BlockPools pools;

  TM_HD int64_t num_rows() const { return table.num_seqs * table.max_seq_len; }
};

// Returns the block of an entry. An offset's top bit chooses the pool.
TM_HD int64_t BlockId(const RowGather& gather, int64_t entry) {
  return gather.table.format == TableFormat::kOffsets ? entry & 0x7fffffff : entry;
}

// Returns the address of the block of an entry, or null if the entry lies outside of the cache.
TM_HD const std::byte* FindBlock(const RowGather& gather, int side, int64_t entry) {
  const int64_t block = BlockId(gather, entry);
  if (block < 0 || block >= gather.shape.blocks) {
    return nullptr;
  }
  if (gather.table.format != TableFormat::kOffsets) {
    return gather.sides[side].cache.base + block * gather.sides[side].cache.block;
  }
  const std::byte* const pool = entry < 0 ? gather.pools.secondary : gather.pools.primary;
  return pool == nullptr ? nullptr : pool + block * gather.pools.bytes_per_block;
}

// Why the CUDA library did not queue a transfer.
enum class TransferResult : int32_t {
  kQueued = 0,
  kNotGpuMemory = 1,  // an address is of memory that no GPU can access
  kOtherGpu = 2,      // the memory of one transfer belongs to several GPUs
  kFailed = 3         // an error of the driver
};

}  // namespace turbomind
