#pragma once

// Linear layers of the CPU device, one weight or many: they check shapes, cut the work of all
// groups into items of one parallel section and call the kernels of one instruction set. How the
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
  int64_t panels = 0;  // where its packed activations begin, bytes
  int64_t first_panel = 0;
  int64_t panels_per_block = 0;
  int64_t num_row_blocks = 0;
  int64_t tiles_per_item = 0;
  int64_t num_tile_groups = 0;
  int64_t first_item = 0;
};

// Of one call; grows to the largest call.
struct CpuLinearScratch {
  std::vector<uint8_t> panels;       // packed activations
  std::vector<CpuLinearPlan> plans;  // of the weights that have rows, in order of their items
};

void CpuLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
               const LinearParams& params);
void CpuGroupedLinear(const CpuDenseKernels& kernels, ThreadPool& pool, CpuLinearScratch& scratch,
                      const GroupedLinearParams& params);

}  // namespace turbomind
