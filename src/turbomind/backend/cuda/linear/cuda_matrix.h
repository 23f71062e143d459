#pragma once

// ⑥ Weight matrices in GPU memory, and how they get there.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "turbomind/backend/cuda/linear/matrix_layout.h"
#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Brings bytes that are made on the host into GPU memory: through two pinned buffers, so that one
// is filled by all threads of a pool while the other is copied. One thread at a time.
class Uploader {
 public:
  // Copies go to `stream`, which outlives this, as the pool does.
  Uploader(Stream stream, ThreadPool& pool);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  // fill(i, out) writes the item_bytes of item i; called by several threads, each item once, in any
  // order. The GPU has it all when this returns.
  void Upload(void* to, int64_t num_items, int64_t item_bytes,
              FunctionRef<void(int64_t item, uint8_t* out)> fill);

 private:
  void Grow(size_t num_bytes);

  Stream stream_;
  ThreadPool& pool_;
  uint8_t* pinned_[2] = {nullptr, nullptr};
  size_t pinned_bytes_ = 0;
};

// GPU memory for matrices. A driver gives memory in pages of 2 MiB, of which matrices of a few MB,
// as experts are, would waste up to a third; those lie side by side in pieces of kPagesOfPiece
// pages. A piece is given back with the last matrix in it. One thread at a time; matrices may
// outlive this, in any thread.
class MatrixMemory {
 public:
  static constexpr size_t kPagesOfPiece = 32;

  // Matrices of over a quarter of a piece have their own memory, as those have that fill nine
  // tenths of their pages, and all where a piece has 0 bytes.
  explicit MatrixMemory(size_t piece_bytes = 0) : piece_bytes_(piece_bytes) {}

  // On the current GPU; 256-byte aligned, not cleared. Throws OutOfMemory.
  std::shared_ptr<char> Allocate(size_t num_bytes);

 private:
  bool HasOwn(size_t num_bytes) const;

  const size_t piece_bytes_;
  std::shared_ptr<char> piece_;  // the newest
  size_t used_bytes_ = 0;        // of it
};

// A matrix as matrix_layout.h says.
class CudaMatrix final : public PackedMatrix {
 public:
  // The memory is not cleared. Throws OutOfMemory.
  CudaMatrix(MatrixMemory& memory, MatrixFormat stored, int64_t num_rows, int64_t num_cols);

  int64_t num_bytes() const override { return NumTiles(rows) * TileBytes(format, cols); }
  char* data() const { return data_.get(); }  // on the GPU

 private:
  std::shared_ptr<char> data_;
};

// A copy of a matrix that lies on the host, as CudaMatrix. `exact`: kF32, every value as it is
// defined; else the format of the source. Throws InvalidArgument as CheckMatrixSource does and for
// packed sources, OutOfMemory where the GPU is full.
std::unique_ptr<PackedMatrix> CudaPackMatrix(MatrixMemory& memory, Uploader& uploader,
                                             const MatrixSource& source, bool exact);

}  // namespace turbomind::cuda
