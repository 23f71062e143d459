#pragma once

#include <cstdint>
#include <memory>

#include "turbomind/backend/cpu/packed_matrix.h"

namespace turbomind {

// MXFP4 weights in the checkpoint's own layout, row after row, in either of its two forms. Reads
// never go past the end of the last row, because it can be the last of its mapping.
class CpuMxfp4Matrix final : public CpuMatrix {
 public:
  // Keeps source.owner alive and reads in place; without an owner, copies the data. Throws
  // InvalidArgument for empty shapes and if cols is not a multiple of 32.
  // REQUIRES: IsMxfp4(source.format).
  CpuMxfp4Matrix(const MatrixSource& source, MatrixArena& arena, ThreadPool& pool);

  int64_t num_bytes() const override;
  const uint8_t* tile(int64_t index) const override;
  const uint8_t* tile_scales(int64_t index) const override;
  void ReadRow(int64_t row, float* out) const override;

 private:
  std::shared_ptr<const void> owner_;
  const uint8_t* data_ = nullptr;    // [rows, MxRowBytes]
  const uint8_t* scales_ = nullptr;  // kMxfp4Split: [rows, cols / 32]
};

}  // namespace turbomind
