#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/matrix_source.h"

namespace turbomind {

// Reserves zero-filled pages that the system allocates on first touch. Throws std::bad_alloc.
// Returns nullptr for 0 bytes.
void* ReservePages(size_t num_bytes);
void ReleasePages(void* memory, size_t num_bytes);

// Owns pages from ReservePages.
class Pages {
 public:
  explicit Pages(int64_t num_bytes)
      : num_bytes_(static_cast<size_t>(num_bytes)),
        data_(static_cast<uint8_t*>(ReservePages(num_bytes_))) {}
  ~Pages() { ReleasePages(data_, num_bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  uint8_t* data() const { return data_; }

 private:
  size_t num_bytes_;
  uint8_t* data_;
};

// Memory for packed matrices. Matrices lie next to each other in large regions, so that huge pages
// cover small matrices too; otherwise page walks cost a third of the read bandwidth. Memory is
// never reused. A region returns to the system with its last matrix. Use it from one thread at a
// time.
class MatrixArena {
 public:
  // Returns zero-filled, 64-byte aligned memory. Throws std::bad_alloc.
  std::shared_ptr<uint8_t> Allocate(size_t num_bytes);

 private:
  std::shared_ptr<uint8_t> region_;
  size_t region_bytes_ = 0;
  size_t used_bytes_ = 0;
};

// Copies with all threads of the pool. REQUIRES: num_bytes readable and writable, no overlap.
void CopyBytes(ThreadPool& pool, const void* from, int64_t num_bytes, uint8_t* to);

// Weights in the layout that the CPU kernels read (packed_layout.h), in tiles of 16 outputs.
// Immutable once built.
class CpuMatrix : public PackedMatrix {
 public:
  int64_t num_tiles() const;
  virtual const uint8_t* tile(int64_t index) const = 0;
  // Returns the scales of a tile's outputs for kMxfp4Split, and null for other formats.
  virtual const uint8_t* tile_scales(int64_t /*index*/) const { return nullptr; }

  // Dequantizes one row. REQUIRES: row in [0, rows).
  virtual void ReadRow(int64_t row, float* out) const = 0;
};

// A matrix repacked into tiles. For MXFP4, see mxfp4_matrix.h.
class CpuPackedMatrix final : public CpuMatrix {
 public:
  // Converts every source to kF32 if `exact` is set. Throws InvalidArgument as CheckMatrixSource
  // does. A packed source is also rejected if it is MXFP4, is not aligned to 64 bytes, or is not
  // kF32 although `exact` is set.
  // REQUIRES: exact or not IsMxfp4(source.format); a packed source has PackedBytes() of its shape.
  CpuPackedMatrix(const MatrixSource& source, bool exact, MatrixArena& arena, ThreadPool& pool);

  int64_t num_bytes() const override { return num_tiles() * tile_bytes_; }
  const uint8_t* tile(int64_t index) const override { return data_ + index * tile_bytes_; }
  void ReadRow(int64_t row, float* out) const override;
  const uint8_t* packed_data() const override { return data_; }

 private:
  void TakePacked(const MatrixSource& source, MatrixArena& arena, ThreadPool& pool);

  int64_t tile_bytes_ = 0;
  std::shared_ptr<const void> owner_;
  const uint8_t* data_ = nullptr;  // [num_tiles, tile_bytes_]
};

}  // namespace turbomind
