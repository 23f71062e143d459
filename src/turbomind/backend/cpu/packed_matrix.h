#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// Zero-filled pages of the system, taken when first touched. Throws std::bad_alloc; nullptr for 0
// bytes.
void* ReservePages(size_t num_bytes);
void ReleasePages(void* memory, size_t num_bytes);

// Where packed matrices lie: side by side in large regions, so that huge pages cover small matrices
// too (page walks cost a third of the read bandwidth otherwise). Never reuses memory; a region goes
// back to the system with its last matrix. One thread at a time.
class MatrixArena {
 public:
  // Zero-filled, 64-byte aligned. Throws std::bad_alloc.
  std::shared_ptr<uint8_t> Allocate(size_t num_bytes);

 private:
  std::shared_ptr<uint8_t> region_;
  size_t region_bytes_ = 0;
  size_t used_bytes_ = 0;
};

// Weights as the CPU kernels read them (packed_layout.h): tiles of 16 outputs. Immutable once
// built. With `exact` every source becomes kF32.
class CpuPackedMatrix final : public PackedMatrix {
 public:
  // Throws InvalidArgument for empty shapes and for quantised sources whose cols are not a multiple
  // of 32.
  CpuPackedMatrix(const MatrixSource& source, bool exact, MatrixArena& arena, ThreadPool& pool);

  int64_t num_bytes() const override { return num_tiles() * tile_bytes_; }
  int64_t num_tiles() const;
  int64_t tile_bytes() const { return tile_bytes_; }
  const uint8_t* tile(int64_t index) const { return data_.get() + index * tile_bytes_; }

  // Dequantises one row. REQUIRES: row in [0, rows).
  void ReadRow(int64_t row, float* out) const;

 private:
  int64_t tile_bytes_ = 0;
  std::shared_ptr<uint8_t> data_;  // [num_tiles, tile_bytes_]
};

}  // namespace turbomind
