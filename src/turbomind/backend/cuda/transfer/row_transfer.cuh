#pragma once

// A block moves the rows of all heads of one token of K or V, then those of a later token. A thread
// moves units of up to 16 bytes. Bound: memory, which every byte crosses once.

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/backend/row_transfer.h"

namespace turbomind::cuda {

inline constexpr int kConvertedValues = 4;  // of a unit, if they lie together

// How the threads of a block share the rows of a token. A row has `row_units` units of `values`
// values. Thread t begins with unit t; the next one is `step_heads` heads and `step_units` units
// further on.
struct UnitPlan {
  uint32_t values = 1;
  uint32_t row_units = 0;
  uint32_t step_heads = 0;
  uint32_t step_units = 0;
};

template <class Job>
struct TransferParams {
  Job job;
  UnitPlan units[2];  // of K and V
  int64_t num_rows = 0;
  int64_t num_blocks = 0;  // of the grid in x
};

TM_DEVICE int64_t LoadIndex(const IndexArray& array, int64_t i) {
  return array.is_wide ? LoadGlobal(static_cast<const int64_t*>(array.data) + i)
                       : int64_t{LoadGlobal(static_cast<const int32_t*>(array.data) + i)};
}

TM_DEVICE float LoadFloat(const std::byte* from, RowType type) {
  if (type == RowType::kF32) {
    return LoadGlobal(reinterpret_cast<const float*>(from));
  }
  const uint16_t bits = LoadGlobal(reinterpret_cast<const uint16_t*>(from));
  return type == RowType::kF16 ? ConvertHalf(bits) : BFloat16ToFloat(bits);
}

// NaN becomes 0x7F in both FP8 types.
TM_DEVICE uint32_t PackFp8(RowType type, float low, float high) {
  const uint32_t codes = type == RowType::kE4M3
                             ? PackE4m3(IsNan(low) ? 0.f : low, IsNan(high) ? 0.f : high)
                             : PackE5m2(IsNan(low) ? 0.f : low, IsNan(high) ? 0.f : high);
  const uint32_t low_code = IsNan(low) ? 0x7fu : codes & 0xffu;
  const uint32_t high_code = IsNan(high) ? 0x7fu : codes >> 8 & 0xffu;
  return low_code | high_code << 8;
}

TM_DEVICE uint32_t PackPair(RowType type, float low, float high) {
  return type == RowType::kF16 ? PackHalf2(low, high) : PackBFloat2(low, high);
}

TM_DEVICE void StoreFloat(float x, RowType type, std::byte* to) {
  if (type == RowType::kF32) {
    StoreGlobal(reinterpret_cast<float*>(to), x);
  } else if (IsFp8(type)) {
    StoreGlobal(reinterpret_cast<uint8_t*>(to), static_cast<uint8_t>(PackFp8(type, x, 0.f)));
  } else {
    StoreGlobal(reinterpret_cast<uint16_t*>(to), static_cast<uint16_t>(PackPair(type, x, 0.f)));
  }
}

// Load and store four values that lie together.
TM_DEVICE void LoadFour(const std::byte* from, RowType type, float (&x)[kConvertedValues]) {
  if (type == RowType::kF32) {
    const auto words = LoadGlobal(reinterpret_cast<const Words<16>*>(from));
#pragma unroll
    for (int i = 0; i < kConvertedValues; ++i) {
      x[i] = BitsFloat(words.v[i]);
    }
    return;
  }
  const auto words = LoadGlobal(reinterpret_cast<const Words<8>*>(from));
#pragma unroll
  for (int i = 0; i < kConvertedValues; ++i) {
    const auto bits = static_cast<uint16_t>(words.v[i / 2] >> (16 * (i % 2)));
    x[i] = type == RowType::kF16 ? ConvertHalf(bits) : BFloat16ToFloat(bits);
  }
}

TM_DEVICE void StoreFour(const float (&x)[kConvertedValues], RowType type, std::byte* to) {
  if (type == RowType::kF32) {
    const Words<16> words = {FloatBits(x[0]), FloatBits(x[1]), FloatBits(x[2]), FloatBits(x[3])};
    StoreGlobal(reinterpret_cast<Words<16>*>(to), words);
  } else if (IsFp8(type)) {
    const uint32_t codes = PackFp8(type, x[0], x[1]) | PackFp8(type, x[2], x[3]) << 16;
    StoreGlobal(reinterpret_cast<uint32_t*>(to), codes);
  } else {
    const Words<8> words = {PackPair(type, x[0], x[1]), PackPair(type, x[2], x[3])};
    StoreGlobal(reinterpret_cast<Words<8>*>(to), words);
  }
}

template <class Word>
TM_DEVICE void CopyWord(const std::byte* from, std::byte* to) {
  StoreGlobal(reinterpret_cast<Word*>(to), LoadGlobal(reinterpret_cast<const Word*>(from)));
}

TM_DEVICE void CopyUnit(const std::byte* from, std::byte* to, uint32_t num_bytes) {
  switch (num_bytes) {
    case 16:
      return CopyWord<Words<16>>(from, to);
    case 8:
      return CopyWord<Words<8>>(from, to);
    case 4:
      return CopyWord<uint32_t>(from, to);
    case 2:
      return CopyWord<uint16_t>(from, to);
    default:
      CopyWord<uint8_t>(from, to);
  }
}

// Where a unit comes from and where it goes. Values are divided by `scale`.
struct UnitMove {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  RowType from_type = RowType::kF32;
  RowType to_type = RowType::kF32;
  uint32_t values = 1;
  float scale = 1.f;
};

TM_DEVICE void MoveUnit(const UnitMove& move) {
  if (move.from_type == move.to_type) {
    CopyUnit(move.from, move.to, move.values * static_cast<uint32_t>(BytesOf(move.to_type)));
  } else if (move.values == 1) {
    StoreFloat(LoadFloat(move.from, move.from_type) / move.scale, move.to_type, move.to);
  } else {
    float x[kConvertedValues];
    LoadFour(move.from, move.from_type, x);
#pragma unroll
    for (float& value : x) {
      value = value / move.scale;
    }
    StoreFour(x, move.to_type, move.to);
  }
}

// Call fn(head, first value) for the thread's units of a token.
template <class F>
TM_DEVICE void ForEachUnit(const UnitPlan& plan, int64_t heads, F&& fn) {
  uint32_t unit = static_cast<uint32_t>(ThreadIndexX()) % plan.row_units;
  int64_t head = static_cast<uint32_t>(ThreadIndexX()) / plan.row_units;
  while (head < heads) {
    fn(head, unit * plan.values);
    unit += plan.step_units;
    head += plan.step_heads;
    if (unit >= plan.row_units) {
      unit -= plan.row_units;
      ++head;
    }
  }
}

// Return the place of a value in the dense rows.
TM_DEVICE std::byte* DenseValue(const TransferSide& side, const PagedShape& shape, int64_t row,
                                int64_t head, uint32_t d) {
  return side.rows + ((row * shape.heads + head) * shape.head_dim + d) * BytesOf(side.row_type);
}

TM_DEVICE float LoadScale(const TransferSide& side, int64_t block, int64_t head) {
  const bool has_scale =
      side.scales.data != nullptr && IsFp8(side.cache_type) && side.row_type != side.cache_type;
  return has_scale ? LoadGlobal(reinterpret_cast<const float*>(side.scales.At(block, head))) : 1.f;
}

TM_DEVICE void WriteToken(const RowWrite& write, const TransferSide& side, const UnitPlan& plan,
                          int64_t row) {
  const int64_t slot = LoadIndex(write.slots.slots, row);
  if (!write.slots.IsUsed(slot) || slot >= write.shape.num_slots()) {
    return;
  }
  const SlotPlace place = PlaceOf(slot, write.shape.block_size);
  const PagedView& cache = side.cache;
  std::byte* const token = cache.base + place.block * cache.block + place.offset * cache.token;
  ForEachUnit(plan, write.shape.heads, [&](int64_t head, uint32_t d) {
    const float scale = LoadScale(side, place.block, head);
    if (IsValidScale(scale)) {
      MoveUnit({.from = DenseValue(side, write.shape, row, head, d),
                .to = token + head * cache.head + cache.ValueOffset(d),
                .from_type = side.row_type,
                .to_type = side.cache_type,
                .values = plan.values,
                .scale = scale});
    }
  });
}

struct FoundEntry {
  bool exists = false;
  int64_t entry = 0;
};

// Find the table entry of a token. It does not exist behind the length or the end of the table.
TM_DEVICE FoundEntry FindEntry(const RowGather& gather, int side, int64_t seq, int64_t token) {
  const TableMap& table = gather.table;
  if (token >= LoadIndex(table.lengths, seq)) {
    return {};
  }
  int64_t index = 0;
  if (table.is_ragged()) {
    const int64_t begin = LoadIndex(table.indptr, seq);
    const int64_t end = LoadIndex(table.indptr, seq + 1);
    if (begin < 0 || end < begin || end > table.num_indices || token >= end - begin) {
      return {};
    }
    index = begin + token;
  } else {
    const int64_t block = PlaceOf(token, gather.shape.block_size).block;
    if (block >= table.max_blocks_per_seq) {
      return {};
    }
    index = table.FirstEntry(side, seq) + block;
  }
  return {true, LoadIndex(table.indices, index)};
}

TM_DEVICE void GatherToken(const RowGather& gather, int side_index, const UnitPlan& plan,
                           int64_t row) {
  const SlotPlace place = PlaceOf(row, gather.table.max_seq_len);  // sequence and token
  const FoundEntry found = FindEntry(gather, side_index, place.block, place.offset);
  const std::byte* const block =
      found.exists ? FindBlock(gather, side_index, found.entry) : nullptr;
  if (block == nullptr) {
    return;
  }
  const TransferSide& side = gather.sides[side_index];
  const PagedView& cache = side.cache;
  const std::byte* const token =
      block + PlaceOf(place.offset, gather.shape.block_size).offset * cache.token;
  ForEachUnit(plan, gather.shape.heads, [&](int64_t head, uint32_t d) {
    MoveUnit({.from = token + head * cache.head + cache.ValueOffset(d),
              .to = DenseValue(side, gather.shape, row, head, d),
              .from_type = side.cache_type,
              .to_type = side.row_type,
              .values = plan.values});
  });
}

}  // namespace turbomind::cuda
