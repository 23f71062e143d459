#include "kvx/src/transfer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kvx/src/place.h"
#include "kvx/src/rows.h"
#include "kvx/src/tables.h"
#include "kvx/src/validate.h"

namespace kvx {
namespace {

constexpr int64_t kPiece = 256;  // values that are converted at once

// The FP8 scales of one side, by block and head.
struct Scales {
  const std::byte* data = nullptr;  // null means 1
  int64_t block = 0;                // strides in bytes
  int64_t head = 0;

  float At(int64_t b, int64_t h) const {
    float scale = 1.f;
    if (data != nullptr) {
      std::memcpy(&scale, data + b * block + h * head, sizeof(scale));
    }
    return scale;
  }
};

// REQUIRES: CheckWrite accepted the descriptor.
Scales ScalesOf(const kvx_scale_desc_t& desc, const void* per_tensor, const Counts& counts) {
  if (!CheckScales(desc, counts)) {
    return {static_cast<const std::byte*>(per_tensor)};
  }
  Scales scales = {static_cast<const std::byte*>(desc.data)};
  const int granularity = Raw(desc.granularity);
  const auto stride = [&](int i) {
    return desc.shape[i] > 1 ? desc.stride[i] * static_cast<int64_t>(sizeof(float)) : 0;
  };
  if (granularity == KVX_SCALE_PER_BLOCK || granularity == KVX_SCALE_PER_BLOCK_HEAD) {
    scales.block = stride(0);
  }
  if (granularity == KVX_SCALE_PER_HEAD || granularity == KVX_SCALE_PER_BLOCK_HEAD) {
    scales.head = stride(granularity == KVX_SCALE_PER_HEAD ? 0 : 1);
  }
  return scales;
}

// Moves n bytes. The common sizes of a chunk avoid a call.
inline void CopyBytes(std::byte* to, const std::byte* from, int64_t n) {
  switch (n) {
    case 16:
      return static_cast<void>(std::memcpy(to, from, 16));
    case 8:
      return static_cast<void>(std::memcpy(to, from, 8));
    case 4:
      return static_cast<void>(std::memcpy(to, from, 4));
    case 2:
      return static_cast<void>(std::memcpy(to, from, 2));
    case 1:
      return static_cast<void>(std::memcpy(to, from, 1));
    default:
      std::memcpy(to, from, static_cast<size_t>(n));
  }
}

// K or V: the IO tensor beside the cache.
class Side {
 public:
  Side(const kvx_tensor_desc_t& io, const kvx_tensor_desc_t& cache, const Counts& counts)
      : view_(ViewOf(cache, counts.head_dim)),
        io_(static_cast<std::byte*>(io.data)),
        io_dtype_(Raw(io.dtype)),
        element_(ElementBytes(view_.dtype)),
        io_element_(ElementBytes(io_dtype_)),
        heads_(counts.heads),
        row_(counts.head_dim) {}

  const CacheView& view() const { return view_; }
  bool has_equal_dtypes() const { return io_dtype_ == view_.dtype; }
  // FP8 values outside the cache have no scale.
  bool has_fp8_io() const { return IsFp8(io_dtype_); }

  // Stores row `token` of the IO tensor in the rows of a token of the cache.
  void Write(int64_t token, std::byte* to, const Scales& scales, int64_t block) const {
    const std::byte* from = io_ + token * heads_ * row_ * io_element_;
    for (int64_t head = 0; head < heads_; ++head, from += row_ * io_element_, to += view_.head) {
      if (has_equal_dtypes()) {
        Scatter(from, to, 0, row_);
        continue;
      }
      const float scale = IsFp8(view_.dtype) ? scales.At(block, head) : 1.f;
      for (int64_t first = 0; first < row_; first += kPiece) {
        const int64_t n = std::min(kPiece, row_ - first);
        float buffer[kPiece];
        const float* values = buffer;
        if (io_dtype_ == KVX_DTYPE_F32) {
          values = reinterpret_cast<const float*>(from) + first;
        } else {
          LoadRow(from + first * io_element_, io_dtype_, n, buffer);
        }
        const turbomind::RowFormat format = PlainFormat(view_.dtype, n, scale);
        if (view_.is_dense()) {
          StoreRow(values, format, to + first * element_);
          continue;
        }
        std::byte codes[kPiece * sizeof(float)];
        StoreRow(values, format, codes);
        Scatter(codes, to, first, n);
      }
    }
  }

  // Reads the rows of a token of the cache into row `token` of the IO tensor.
  void Read(int64_t token, const std::byte* from) const {
    std::byte* to = io_ + token * heads_ * row_ * io_element_;
    for (int64_t head = 0; head < heads_; ++head, to += row_ * io_element_, from += view_.head) {
      if (has_equal_dtypes()) {
        Collect(from, to, 0, row_);
        continue;
      }
      for (int64_t first = 0; first < row_; first += kPiece) {
        const int64_t n = std::min(kPiece, row_ - first);
        float values[kPiece];
        std::byte codes[kPiece * sizeof(float)];
        Collect(from, codes, first, n);
        LoadRow(codes, view_.dtype, n, values);
        StoreRow(values, PlainFormat(io_dtype_, n), to + first * io_element_);
      }
    }
  }

 private:
  // Calls fn(offset in the row of the cache, values before it, values) for each dense part.
  template <class F>
  void ForEachPart(int64_t first, int64_t n, F&& fn) const {
    if (view_.is_dense()) {
      return fn(first * element_, 0, n);
    }
    const bool is_chunked = view_.value == element_;
    for (int64_t i = 0; i < n;) {
      const int64_t d = first + i;
      const int64_t count = is_chunked ? std::min(view_.pack - d % view_.pack, n - i) : 1;
      fn(d / view_.pack * view_.chunk + d % view_.pack * view_.value, i, count);
      i += count;
    }
  }

  // Moves n values from `first` on between contiguous memory and a row of the cache.
  void Scatter(const std::byte* from, std::byte* row, int64_t first, int64_t n) const {
    ForEachPart(first, n, [&](int64_t offset, int64_t i, int64_t count) {
      CopyBytes(row + offset, from + i * element_, count * element_);
    });
  }
  void Collect(const std::byte* row, std::byte* to, int64_t first, int64_t n) const {
    ForEachPart(first, n, [&](int64_t offset, int64_t i, int64_t count) {
      CopyBytes(to + i * element_, row + offset, count * element_);
    });
  }

  CacheView view_;
  std::byte* io_;
  int io_dtype_;
  int64_t element_;
  int64_t io_element_;
  int64_t heads_;
  int64_t row_;
};

}  // namespace

void WriteKv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write) {
  const Counts counts = CheckCache(cache);
  CheckWrite(write, counts);
  RequireHostCache(*cache);
  const Side sides[2] = {{write->io.key, cache->k, counts}, {write->io.value, cache->v, counts}};
  const Scales scales[2] = {ScalesOf(write->k_scale_desc, write->k_scale, counts),
                            ScalesOf(write->v_scale_desc, write->v_scale, counts)};
  const Slots slots(write->slots, counts);
  for (int i = 0; i < 2; ++i) {
    const bool is_copy = sides[i].has_equal_dtypes();
    Require(is_copy || !sides[i].has_fp8_io(), KVX_STATUS_UNSUPPORTED);
    if (!is_copy && IsFp8(sides[i].view().dtype)) {
      slots.ForEach([&](int64_t, int64_t block, int64_t) {
        for (int64_t head = 0; head < counts.heads; ++head) {
          const float scale = scales[i].At(block, head);
          Require(std::isfinite(scale) && scale > 0.f);
        }
      });
    }
  }
  for (int i = 0; i < 2; ++i) {
    const CacheView& view = sides[i].view();
    slots.ForEach([&](int64_t token, int64_t block, int64_t offset) {
      std::byte* to = view.base + block * view.block + offset * view.token;
      sides[i].Write(token, to, scales[i], block);
    });
  }
}

void GatherKv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather) {
  const Counts counts = CheckCache(cache);
  CheckGather(gather, counts);
  const kvx_pool_desc_t& pool = cache->pool;
  const bool has_offsets = Raw(gather->block_table.format) == KVX_BLOCK_TABLE_KV_OFFSETS;
  if (has_offsets) {
    CheckPool(*cache, counts);
  }
  RequireHostCache(*cache);
  const Side sides[2] = {{gather->io.key, cache->k, counts}, {gather->io.value, cache->v, counts}};
  for (const Side& side : sides) {
    const bool has_fp8 = side.has_fp8_io() || IsFp8(side.view().dtype);
    Require(side.has_equal_dtypes() || !has_fp8, KVX_STATUS_UNSUPPORTED);
  }
  const Tables tables(*gather, counts, has_offsets && pool.secondary != nullptr);
  for (int i = 0; i < 2; ++i) {
    const CacheView& view = sides[i].view();
    tables.ForEach(i, [&](int64_t row, int64_t entry, int64_t offset) {
      const void* memory = entry < 0 ? pool.secondary : pool.primary;
      const std::byte* block = has_offsets ? static_cast<const std::byte*>(memory) +
                                                 Tables::PoolIndex(entry) * pool.bytes_per_block
                                           : view.base + entry * view.block;
      sides[i].Read(row, block + offset * view.token);
    });
  }
}

}  // namespace kvx
