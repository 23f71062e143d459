#pragma once

// Linear layers of the CPU device, one weight or many: they check shapes, cut the work of all
// weights into items of one parallel section and call the kernels of one instruction set. How the
// work is cut never changes a bit of the result.

#include <cstdint>
#include <vector>

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// How the rows of one weight are cut: row blocks that stay in L2 times groups of tiles.
struct CpuLinearPlan {
  const CpuMatrix* weight = nullptr;
  const float* bias = nullptr;
  int64_t first_row = 0;  // of y
  int num_rows = 0;
  int64_t first_output = 0;  // column of y
  int64_t panels = 0;  // where its packed activations begin, bytes; parts of a layer share them
  int64_t first_panel = 0;
  int64_t panel_bytes = 0;  // of a full one
  int64_t panels_per_block = 0;
  int64_t num_row_blocks = 0;
  int64_t tiles_per_item = 0;
  int64_t num_tile_groups = 0;
  int64_t first_item = 0;
};

// Bytes at a multiple of 64: a register that crosses a line is read twice. What they held is lost
// when they grow.
class CpuScratchBytes {
 public:
  void Grow(int64_t num_bytes) {
    const auto size = static_cast<size_t>(num_bytes) + 63;
    if (bytes_.size() < size) {
      bytes_ = std::vector<uint8_t>(size);
    }
  }
  uint8_t* data() { return bytes_.data() + (-reinterpret_cast<uintptr_t>(bytes_.data()) & 63); }

 private:
  std::vector<uint8_t> bytes_;
};

// Of one call; grows to the largest call.
struct CpuLinearScratch {
  CpuScratchBytes panels;            // packed activations
  CpuScratchBytes tiles;             // of each worker: MultiplyArgs::scratch
  int64_t tile_stride = 0;           // bytes between workers
  std::vector<CpuLinearPlan> plans;  // of the weights that have rows, in order of their items
};

void CpuLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
               const LinearParams& params);
void CpuGroupedLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                      const GroupedLinearParams& params);

}  // namespace turbomind
