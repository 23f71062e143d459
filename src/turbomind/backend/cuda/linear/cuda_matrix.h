#pragma once

// ⑥ Weight matrices in GPU memory, and their upload.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "turbomind/backend/cuda/linear/matrix_layout.h"
#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Uploads bytes that are computed on the host into GPU memory. It uses two pinned buffers: all
// threads of a pool fill one while the other is copied. One thread at a time.
class Uploader {
 public:
  // Copies are queued on `stream`. REQUIRES: the stream and the pool outlive this object.
  Uploader(Stream stream, ThreadPool& pool);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  // fill(i, out) writes the item_bytes of item i. Several threads call it, once per item and in any
  // order. When this returns, all bytes are on the GPU.
  void Upload(void* to, int64_t num_items, int64_t item_bytes,
              FunctionRef<void(int64_t item, uint8_t* out)> fill);

 private:
  void Grow(size_t num_bytes);

  Stream stream_;
  ThreadPool& pool_;
  uint8_t* pinned_[2] = {nullptr, nullptr};
  size_t pinned_bytes_ = 0;
};

// GPU memory for matrices. Drivers allocate pages of 2 MiB. Matrices of a few MB, such as experts,
// would waste up to a third of that, so they are packed into pieces of kPagesOfPiece pages. A piece
// is released with the last matrix in it. One thread at a time; matrices may outlive this object
// and be released in any thread.
class MatrixMemory {
 public:
  static constexpr size_t kPagesOfPiece = 32;

  // A matrix has its own memory if it is larger than a quarter of a piece, or if it fills nine
  // tenths of its pages. If piece_bytes is 0, every matrix has its own memory.
  explicit MatrixMemory(size_t piece_bytes = 0) : piece_bytes_(piece_bytes) {}

  // Allocate on the current GPU: 256-byte aligned, not cleared. Throws OutOfMemory.
  std::shared_ptr<char> Allocate(size_t num_bytes);

 private:
  bool HasOwn(size_t num_bytes) const;

  const size_t piece_bytes_;
  std::shared_ptr<char> piece_;  // the newest piece
  size_t used_bytes_ = 0;        // bytes used in it
};

// A matrix in the layout of matrix_layout.h.
class CudaMatrix final : public PackedMatrix {
 public:
  // The memory is not cleared. Throws OutOfMemory.
  CudaMatrix(MatrixMemory& memory, MatrixFormat stored, int64_t num_rows, int64_t num_cols);

  int64_t num_bytes() const override { return NumTiles(rows) * TileBytes(format, cols); }
  char* data() const { return data_.get(); }  // on the GPU
  // What multiplies the values of weight_fragments.cuh: 1, or 2^8 times the source's factor if
  // HasFactor.
  float factor = 1.f;

 private:
  std::shared_ptr<char> data_;
};

// Copy a matrix from the host into a CudaMatrix. `exact` stores kF32 with every value as defined;
// otherwise the format is that of the source. Throws InvalidArgument like CheckMatrixSource and for
// packed sources, and OutOfMemory if the GPU is full.
std::unique_ptr<PackedMatrix> CudaPackMatrix(MatrixMemory& memory, Uploader& uploader,
                                             const MatrixSource& source, bool exact);

}  // namespace turbomind::cuda
