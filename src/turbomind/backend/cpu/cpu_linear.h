#pragma once

// Linear layers of the CPU device, with one weight or many. They check shapes, split the work of
// all weights into items of one parallel section and call the kernels of one instruction set. The
// split never changes a bit of the result.

#include <cstdint>
#include <vector>

#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/latent_params.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// The split of one weight's work: row blocks that stay in L2, times groups of tiles.
struct CpuLinearPlan {
  const CpuMatrix* weight = nullptr;
  const LinearKernels* kernels = nullptr;
  const float* bias = nullptr;
  int64_t first_row = 0;  // row of y
  int num_rows = 0;
  int64_t first_output = 0;  // column of y
  int64_t first_input = 0;   // column of x
  int64_t panels = 0;  // byte offset of its packed activations; the parts of a layer share them
  int64_t first_panel = 0;
  PanelPlan panel;
  int64_t num_row_blocks = 0;
  int64_t tiles_per_item = 0;
  int64_t num_tile_groups = 0;
  int64_t first_item = 0;
};

// A buffer that starts at a multiple of 64 bytes, because loading a register across a cache line
// costs two reads. Growing discards the contents.
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

// Scratch memory of one call. It grows to the largest call and is reused.
struct CpuLinearScratch {
  CpuScratchBytes panels;            // packed activations
  CpuScratchBytes tiles;             // MultiplyArgs::scratch of each worker
  int64_t tile_stride = 0;           // bytes between workers
  std::vector<CpuLinearPlan> plans;  // the weights that have rows, in order of their items
};

void CpuLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
               const LinearParams& params);
void CpuGroupedLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                      const GroupedLinearParams& params);
void CpuHeadLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                   const HeadLinearParams& params);

}  // namespace turbomind
