#include "kvx/src/transfer.h"

#include <algorithm>
#include <cstring>

#include "kvx/src/gpu.h"
#include "kvx/src/jobs.h"
#include "kvx/src/rows.h"
#include "kvx/src/tables.h"
#include "kvx/src/validate.h"

namespace kvx {
namespace {

constexpr int64_t kPiece = 256;  // values that are converted at once

float ScaleAt(const turbomind::RowScales& scales, int64_t block, int64_t head) {
  float scale = 1.f;
  if (scales.data != nullptr) {
    std::memcpy(&scale, scales.At(block, head), sizeof(scale));
  }
  return scale;
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
  Side(const turbomind::TransferSide& side, const Counts& counts)
      : view_(side.cache),
        scales_(side.scales),
        io_(side.rows),
        dtype_(static_cast<int>(side.cache_type)),
        io_dtype_(static_cast<int>(side.row_type)),
        element_(ElementBytes(dtype_)),
        io_element_(ElementBytes(io_dtype_)),
        heads_(counts.heads),
        row_(counts.head_dim) {}

  // Stores row `token` of the IO tensor in the rows of a token of the cache.
  void Write(int64_t token, std::byte* to, int64_t block) const {
    const std::byte* from = io_ + token * heads_ * row_ * io_element_;
    for (int64_t head = 0; head < heads_; ++head, from += row_ * io_element_, to += view_.head) {
      if (io_dtype_ == dtype_) {
        Scatter(from, to, 0, row_);
        continue;
      }
      const float scale = ScaleAt(scales_, block, head);
      for (int64_t first = 0; first < row_; first += kPiece) {
        const int64_t n = std::min(kPiece, row_ - first);
        float buffer[kPiece];
        const float* values = buffer;
        if (io_dtype_ == KVX_DTYPE_F32) {
          values = reinterpret_cast<const float*>(from) + first;
        } else {
          LoadRow(from + first * io_element_, io_dtype_, n, buffer);
        }
        const turbomind::RowFormat format = PlainFormat(dtype_, n, scale);
        if (is_dense()) {
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
      if (io_dtype_ == dtype_) {
        Collect(from, to, 0, row_);
        continue;
      }
      for (int64_t first = 0; first < row_; first += kPiece) {
        const int64_t n = std::min(kPiece, row_ - first);
        float values[kPiece];
        std::byte codes[kPiece * sizeof(float)];
        Collect(from, codes, first, n);
        LoadRow(codes, dtype_, n, values);
        StoreRow(values, PlainFormat(io_dtype_, n), to + first * io_element_);
      }
    }
  }

 private:
  bool is_dense() const { return view_.chunk == 0 && view_.value == element_; }

  // Calls fn(offset in the row of the cache, values before it, values) for each dense part.
  template <class F>
  void ForEachPart(int64_t first, int64_t n, F&& fn) const {
    if (is_dense()) {
      return fn(first * element_, 0, n);
    }
    const bool is_chunked = view_.value == element_;
    for (int64_t i = 0; i < n;) {
      const int64_t d = first + i;
      const int64_t in_chunk = view_.pack - d % view_.pack;
      const int64_t count = is_chunked ? std::min(in_chunk, n - i) : 1;
      fn(view_.ValueOffset(static_cast<uint32_t>(d)), i, count);
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

  turbomind::PagedView view_;
  turbomind::RowScales scales_;
  std::byte* io_;
  int dtype_;
  int io_dtype_;
  int64_t element_;
  int64_t io_element_;
  int64_t heads_;
  int64_t row_;
};

}  // namespace

void WriteOnHost(const turbomind::RowWrite& write) {
  const Counts& counts = write.shape;
  const Slots slots(write.slots, write.num_rows, counts);
  for (const turbomind::TransferSide& side : write.sides) {
    if (side.scales.data != nullptr) {
      slots.ForEach([&](int64_t, int64_t block, int64_t) {
        for (int64_t head = 0; head < counts.heads; ++head) {
          Require(turbomind::IsValidScale(ScaleAt(side.scales, block, head)));
        }
      });
    }
  }
  for (const turbomind::TransferSide& rows : write.sides) {
    const Side side(rows, counts);
    const turbomind::PagedView& view = rows.cache;
    slots.ForEach([&](int64_t token, int64_t block, int64_t offset) {
      side.Write(token, view.base + block * view.block + offset * view.token, block);
    });
  }
}

void GatherOnHost(const turbomind::RowGather& gather) {
  const Tables tables(gather);
  for (int i = 0; i < 2; ++i) {
    const Side side(gather.sides[i], gather.shape);
    tables.ForEach(i, [&](int64_t row, int64_t entry, int64_t offset) {
      const std::byte* const block = turbomind::FindBlock(gather, i, entry);
      side.Read(row, block + offset * gather.sides[i].cache.token);
    });
  }
}

void WriteKv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, void* stream) {
  const Job<turbomind::RowWrite> job = MakeJob(cache, write);
  if (job.is_on_gpu) {
    WriteOnGpu(job.rows, stream);
  } else {
    WriteOnHost(job.rows);
  }
}

void GatherKv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, void* stream) {
  const Job<turbomind::RowGather> job = MakeJob(cache, gather);
  if (job.is_on_gpu) {
    GatherOnGpu(job.rows, stream);
  } else {
    GatherOnHost(job.rows);
  }
}

}  // namespace kvx
