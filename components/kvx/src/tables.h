#pragma once

// From slots and block tables to blocks and tokens.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvx/kvx_abi.h"
#include "kvx/src/validate.h"

namespace kvx {

// An array of S32 or S64 with any alignment.
class Integers {
 public:
  Integers(const void* data, const kvx_dtype_t& dtype)
      : data_(static_cast<const std::byte*>(data)), is_wide_(Raw(dtype) == KVX_DTYPE_S64) {}

  int64_t operator[](int64_t i) const {
    if (is_wide_) {
      int64_t value;
      std::memcpy(&value, data_ + i * 8, 8);
      return value;
    }
    int32_t value;
    std::memcpy(&value, data_ + i * 4, 4);
    return value;
  }

 private:
  const std::byte* data_;
  bool is_wide_;
};

// The tokens of a write that have a slot.
class Slots {
 public:
  // Throws Refusal for a slot outside the cache.
  Slots(const kvx_slot_mapping_t& slots, const Counts& counts)
      : slots_(slots.slots, slots.dtype),
        num_tokens_(slots.token_count),
        invalid_(slots.invalid_slot),
        block_size_(counts.block_size) {
    for (int64_t i = 0; i < num_tokens_; ++i) {
      Require(!IsUsed(slots_[i]) || slots_[i] < counts.num_slots(), KVX_STATUS_OUT_OF_RANGE);
    }
  }

  // Calls fn(token, block, offset).
  template <class F>
  void ForEach(F&& fn) const {
    for (int64_t i = 0; i < num_tokens_; ++i) {
      const int64_t slot = slots_[i];
      if (IsUsed(slot)) {
        fn(i, slot / block_size_, slot % block_size_);
      }
    }
  }

 private:
  bool IsUsed(int64_t slot) const { return slot >= 0 && slot != invalid_; }

  Integers slots_;
  int64_t num_tokens_;
  int64_t invalid_;
  int64_t block_size_;
};

// The tokens of a gather. An entry is a block id, or a KVCacheIndex of KV_OFFSETS.
class Tables {
 public:
  // Throws Refusal for a length or an entry outside. REQUIRES: CheckGather accepted it.
  Tables(const kvx_gather_desc_t& gather, const Counts& counts, bool has_secondary)
      : table_(gather.block_table),
        indices_(table_.indices, table_.index_dtype),
        indptr_(table_.indptr, table_.indptr_dtype),
        lengths_(gather.seq_lens.lengths, gather.seq_lens.dtype),
        max_seq_len_(gather.max_seq_len),
        block_size_(counts.block_size),
        format_(Raw(table_.format)) {
    CheckIndptr();
    for (int64_t seq = 0; seq < table_.seq_count; ++seq) {
      const bool fits = is_ragged() ? lengths_[seq] <= indptr_[seq + 1] - indptr_[seq]
                                    : (NumTokens(seq) + block_size_ - 1) / block_size_ <=
                                          table_.max_blocks_per_seq;
      Require(lengths_[seq] >= 0 && fits, KVX_STATUS_OUT_OF_RANGE);
    }
    for (int side = 0; side < (has_offsets() ? 2 : 1); ++side) {
      ForEachEntry(side, [&](int64_t, int64_t, int64_t entry) {
        Require(!has_offsets() || entry >= 0 || has_secondary);
        const int64_t block = has_offsets() ? PoolIndex(entry) : entry;
        Require(block >= 0 && block < counts.blocks, KVX_STATUS_OUT_OF_RANGE);
      });
    }
  }

  bool has_offsets() const { return format_ == KVX_BLOCK_TABLE_KV_OFFSETS; }
  static int64_t PoolIndex(int64_t entry) { return entry & 0x7fffffff; }

  // Calls fn(row of the IO tensor, entry, offset in the block) for the tokens of side 0 (K) or 1
  // (V).
  template <class F>
  void ForEach(int side, F&& fn) const {
    ForEachEntry(side, [&](int64_t seq, int64_t first, int64_t entry) {
      const int64_t end = std::min(first + Step(), NumTokens(seq));
      for (int64_t token = first; token < end; ++token) {
        fn(seq * max_seq_len_ + token, entry, token % block_size_);
      }
    });
  }

 private:
  bool is_ragged() const { return format_ == KVX_BLOCK_TABLE_RAGGED; }
  int64_t NumTokens(int64_t seq) const { return std::min(lengths_[seq], max_seq_len_); }
  int64_t Step() const { return is_ragged() ? 1 : block_size_; }  // tokens of an entry

  void CheckIndptr() const {
    if (!is_ragged()) {
      return;
    }
    int64_t previous = indptr_[0];
    Require(previous == 0);
    for (int64_t seq = 1; seq <= table_.seq_count; ++seq) {
      Require(indptr_[seq] >= previous);
      previous = indptr_[seq];
    }
    Require(previous == table_.indices_count);
  }

  // Calls fn(sequence, first token, entry).
  template <class F>
  void ForEachEntry(int side, F&& fn) const {
    for (int64_t seq = 0; seq < table_.seq_count; ++seq) {
      const int64_t row = has_offsets() ? 2 * seq + side : seq;
      const int64_t begin = is_ragged() ? indptr_[seq] : row * table_.max_blocks_per_seq;
      const int64_t num_tokens = NumTokens(seq);
      for (int64_t i = 0; i * Step() < num_tokens; ++i) {
        fn(seq, i * Step(), indices_[begin + i]);
      }
    }
  }

  const kvx_block_table_t& table_;
  Integers indices_;
  Integers indptr_;
  Integers lengths_;
  int64_t max_seq_len_;
  int64_t block_size_;
  int format_;
};

}  // namespace kvx
