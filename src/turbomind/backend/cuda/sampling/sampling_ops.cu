#include <algorithm>
#include <cstdint>

#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/backend/cuda/sampling/sampling_kernels.cuh"
#include "turbomind/backend/cuda/sampling/sampling_ops.h"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {

void CudaSampleRows(const Context& ctx, const SampleRowsParams& params,
                    const RowSampling* samplings) {
  if (params.num_samplings == 0) {
    return;
  }
  SamplingTask task = {.op = params,
                       .num_chunks = static_cast<int>(CeilDiv(params.vocab_size, kChunk)),
                       .num_sums = static_cast<int>(CeilDiv(params.vocab_size, kSumBlock))};
  task.op.samplings = samplings;
  const auto num_samplings = static_cast<size_t>(params.num_samplings);
  const size_t sum_bytes = num_samplings * static_cast<size_t>(task.num_sums) * sizeof(double);
  auto* memory = static_cast<std::byte*>(ctx.workspace->Get(
      sum_bytes + num_samplings * static_cast<size_t>(task.num_chunks) * sizeof(uint32_t)));
  task.sums = reinterpret_cast<double*>(memory);
  task.highest = reinterpret_cast<uint32_t*>(memory + sum_bytes);
  const bool wide =
      params.vocab_size % 4 == 0 && reinterpret_cast<uintptr_t>(params.logits) % 16 == 0;
  Launch(wide ? ChunkMaximaKernel<4> : ChunkMaximaKernel<1>,
         {.grid_x = CeilDiv(task.num_chunks, kChunkWarps * kChunksOfWarp),
          .grid_y = params.num_samplings,
          .threads = 32 * kChunkWarps},
         ctx.stream, task);
  if (std::any_of(
          params.samplings, params.samplings + params.num_samplings,
          [&](const RowSampling& sampling) { return !LimitsCount(sampling, params.vocab_size); })) {
    Launch(WeightSumsKernel,
           {.grid_x = CeilDiv(task.num_sums, kSumWarps * kSumBlocksOfWarp),
            .grid_y = params.num_samplings,
            .threads = 32 * kSumWarps,
            .shared_bytes = kSamplingHeadBytes + 32 * kSumWarps * sizeof(double)},
           ctx.stream, task);
  }
  Launch(wide ? SamplingKernel<4> : SamplingKernel<1>,
         {.grid_x = 1,
          .grid_y = params.num_samplings,
          .threads = 32 * kSamplingWarps,
          .shared_bytes = SamplingSharedBytes(task.num_chunks, task.num_sums)},
         ctx.stream, task);
}

}  // namespace turbomind::cuda
