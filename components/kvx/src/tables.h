#pragma once

// From slots and block tables in host memory to blocks and tokens. Bad contents are refused before
// anything moves.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvx/kvx_abi.h"
#include "kvx/src/validate.h"
#include "turbomind/backend/row_transfer.h"

namespace kvx {

// Reads an array of integers with any alignment.
class Integers {
 public:
  explicit Integers(const turbomind::IndexArray& array)
      : data_(static_cast<const std::byte*>(array.data)), is_wide_(array.is_wide) {}

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
  Slots(const turbomind::SlotMap& map, int64_t num_tokens, const Counts& counts)
      : map_(map), slots_(map.slots), num_tokens_(num_tokens), block_size_(counts.block_size) {
    for (int64_t i = 0; i < num_tokens_; ++i) {
      Require(!map_.IsUsed(slots_[i]) || slots_[i] < counts.num_slots(), KVX_STATUS_OUT_OF_RANGE);
    }
  }

  // Calls fn(token, block, offset).
  template <class F>
  void ForEach(F&& fn) const {
    for (int64_t i = 0; i < num_tokens_; ++i) {
      const int64_t slot = slots_[i];
      if (map_.IsUsed(slot)) {
        const turbomind::SlotPlace place = turbomind::PlaceOf(slot, block_size_);
        fn(i, place.block, place.offset);
      }
    }
  }

 private:
  turbomind::SlotMap map_;
  Integers slots_;
  int64_t num_tokens_;
  int64_t block_size_;
};

// The tokens of a gather. An entry is a block id, or a KVCacheIndex of KV_OFFSETS.
class Tables {
 public:
  // Throws Refusal for a length or an entry outside.
  explicit Tables(const turbomind::RowGather& gather)
      : gather_(gather),
        table_(gather.table),
        indices_(table_.indices),
        indptr_(table_.indptr),
        lengths_(table_.lengths),
        block_size_(gather.shape.block_size) {
    CheckIndptr();
    for (int64_t seq = 0; seq < table_.num_seqs; ++seq) {
      const bool fits = table_.is_ragged() ? lengths_[seq] <= indptr_[seq + 1] - indptr_[seq]
                                           : (NumTokens(seq) + block_size_ - 1) / block_size_ <=
                                                 table_.max_blocks_per_seq;
      Require(lengths_[seq] >= 0 && fits, KVX_STATUS_OUT_OF_RANGE);
    }
    for (int side = 0; side < (has_offsets() ? 2 : 1); ++side) {
      ForEachEntry(side, [&](int64_t, int64_t, int64_t entry) {
        Require(!has_offsets() || entry >= 0 || gather_.pools.secondary != nullptr);
        const int64_t block = turbomind::BlockId(gather_, entry);
        Require(block >= 0 && block < gather_.shape.blocks, KVX_STATUS_OUT_OF_RANGE);
      });
    }
  }

  // Calls fn(row of the IO tensor, entry, offset in the block) for the tokens of side 0 (K) or 1
  // (V).
  template <class F>
  void ForEach(int side, F&& fn) const {
    ForEachEntry(side, [&](int64_t seq, int64_t first, int64_t entry) {
      const int64_t end = std::min(first + Step(), NumTokens(seq));
      for (int64_t token = first; token < end; ++token) {
        fn(seq * table_.max_seq_len + token, entry, token % block_size_);
      }
    });
  }

 private:
  bool has_offsets() const { return table_.format == turbomind::TableFormat::kOffsets; }
  int64_t NumTokens(int64_t seq) const { return table_.NumTokens(lengths_[seq]); }
  int64_t Step() const { return table_.is_ragged() ? 1 : block_size_; }  // tokens of an entry

  void CheckIndptr() const {
    if (!table_.is_ragged()) {
      return;
    }
    int64_t previous = indptr_[0];
    Require(previous == 0);
    for (int64_t seq = 1; seq <= table_.num_seqs; ++seq) {
      Require(indptr_[seq] >= previous);
      previous = indptr_[seq];
    }
    Require(previous == table_.num_indices);
  }

  // Calls fn(sequence, first token, entry).
  template <class F>
  void ForEachEntry(int side, F&& fn) const {
    for (int64_t seq = 0; seq < table_.num_seqs; ++seq) {
      const int64_t begin = table_.is_ragged() ? indptr_[seq] : table_.FirstEntry(side, seq);
      const int64_t num_tokens = NumTokens(seq);
      for (int64_t i = 0; i * Step() < num_tokens; ++i) {
        fn(seq, i * Step(), indices_[begin + i]);
      }
    }
  }

  const turbomind::RowGather& gather_;
  const turbomind::TableMap& table_;
  Integers indices_;
  Integers indptr_;
  Integers lengths_;
  int64_t block_size_;
};

}  // namespace kvx
