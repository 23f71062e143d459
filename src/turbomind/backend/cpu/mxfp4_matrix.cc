#include "turbomind/backend/cpu/mxfp4_matrix.h"

#include "turbomind/backend/cpu/packed_layout.h"

namespace turbomind {
namespace {

int64_t ScaleBytes(MatrixFormat format, int64_t cols) {
  return format == MatrixFormat::kMxfp4Split ? cols / kQuantBlock : 0;
}

}  // namespace

CpuMxfp4Matrix::CpuMxfp4Matrix(const MatrixSource& source, MatrixArena& arena, ThreadPool& pool) {
  CheckMatrixSource(source);
  rows = source.rows;
  cols = source.cols;
  format = source.format;
  if (source.owner != nullptr) {
    owner_ = source.owner;
    data_ = static_cast<const uint8_t*>(source.data);
    scales_ = static_cast<const uint8_t*>(source.scales);
    return;
  }
  const int64_t code_bytes = rows * MxRowBytes(format, cols);
  const std::shared_ptr<uint8_t> copy = arena.Allocate(static_cast<size_t>(num_bytes()));
  CopyBytes(pool, source.data, code_bytes, copy.get());
  data_ = copy.get();
  if (format == MatrixFormat::kMxfp4Split) {
    CopyBytes(pool, source.scales, num_bytes() - code_bytes, copy.get() + code_bytes);
    scales_ = copy.get() + code_bytes;
  }
  owner_ = copy;
}

int64_t CpuMxfp4Matrix::num_bytes() const {
  return rows * (MxRowBytes(format, cols) + ScaleBytes(format, cols));
}

const uint8_t* CpuMxfp4Matrix::tile(int64_t index) const {
  return data_ + index * TileBytes(format, cols);
}

const uint8_t* CpuMxfp4Matrix::tile_scales(int64_t index) const {
  return scales_ == nullptr ? nullptr : scales_ + index * kTileRows * ScaleBytes(format, cols);
}

void CpuMxfp4Matrix::ReadRow(int64_t row, float* out) const {
  DequantizeMatrixRow({format, data_, rows, cols, scales_}, row, out);
}

}  // namespace turbomind
