#pragma once

#include <cstddef>
#include <cstdint>

#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// Zero-filled pages of the system, taken when first touched. Throws std::bad_alloc; nullptr for 0
// bytes.
void* ReservePages(size_t num_bytes);
void ReleasePages(void* memory, size_t num_bytes);

// Weights as the CPU kernels read them (packed_layout.h): tiles of 16 outputs. Immutable once
// built. With `exact` every source becomes kF32.
class CpuPackedMatrix final : public PackedMatrix {
 public:
  // Throws InvalidArgument for empty shapes and for quantised sources whose cols are not a multiple
  // of 32.
  CpuPackedMatrix(const MatrixSource& source, bool exact, ThreadPool& pool);
  ~CpuPackedMatrix() override;
  CpuPackedMatrix(const CpuPackedMatrix&) = delete;
  CpuPackedMatrix& operator=(const CpuPackedMatrix&) = delete;

  int64_t num_bytes() const override { return num_tiles() * tile_bytes_; }
  int64_t num_tiles() const;
  int64_t tile_bytes() const { return tile_bytes_; }
  const uint8_t* tile(int64_t index) const { return data_ + index * tile_bytes_; }

  // Dequantises one row. REQUIRES: row in [0, rows).
  void ReadRow(int64_t row, float* out) const;

 private:
  int64_t tile_bytes_ = 0;
  uint8_t* data_ = nullptr;  // [num_tiles, tile_bytes_]
};

}  // namespace turbomind
