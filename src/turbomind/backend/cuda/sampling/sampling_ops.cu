#include <algorithm>
#include <cstdint>

#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/backend/cuda/sampling/sampling_kernels.cuh"
#include "turbomind/backend/cuda/sampling/sampling_ops.h"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {

void CudaDrawRows(const Context& ctx, const DrawRowsParams& params, const RowDraw* draws) {
  if (params.num_draws == 0) {
    return;
  }
  DrawTask task = {.op = params,
                   .num_chunks = static_cast<int>(CeilDiv(params.vocab_size, kChunk)),
                   .num_sums = static_cast<int>(CeilDiv(params.vocab_size, kSumBlock))};
  task.op.draws = draws;
  const auto num_draws = static_cast<size_t>(params.num_draws);
  const size_t sum_bytes = num_draws * static_cast<size_t>(task.num_sums) * sizeof(double);
  auto* memory = static_cast<std::byte*>(ctx.workspace->Get(
      sum_bytes + num_draws * static_cast<size_t>(task.num_chunks) * sizeof(uint32_t)));
  task.sums = reinterpret_cast<double*>(memory);
  task.highest = reinterpret_cast<uint32_t*>(memory + sum_bytes);
  const bool wide =
      params.vocab_size % 4 == 0 && reinterpret_cast<uintptr_t>(params.logits) % 16 == 0;
  Launch(wide ? ChunkMaximaKernel<4> : ChunkMaximaKernel<1>,
         {.grid_x = CeilDiv(task.num_chunks, kChunkWarps * kChunksOfWarp),
          .grid_y = params.num_draws,
          .threads = 32 * kChunkWarps},
         ctx.stream, task);
  if (std::any_of(params.draws, params.draws + params.num_draws,
                  [&](const RowDraw& draw) { return !LimitsCount(draw, params.vocab_size); })) {
    Launch(WeightSumsKernel,
           {.grid_x = CeilDiv(task.num_sums, kSumWarps * kSumBlocksOfWarp),
            .grid_y = params.num_draws,
            .threads = 32 * kSumWarps,
            .shared_bytes = kDrawHeadBytes + 32 * kSumWarps * sizeof(double)},
           ctx.stream, task);
  }
  Launch(wide ? DrawKernel<4> : DrawKernel<1>,
         {.grid_x = 1,
          .grid_y = params.num_draws,
          .threads = 32 * kDrawWarps,
          .shared_bytes = DrawSharedBytes(task.num_chunks, task.num_sums)},
         ctx.stream, task);
}

}  // namespace turbomind::cuda
