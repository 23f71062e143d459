#include <cstdint>
#include <type_traits>

#include "turbomind/backend/cuda/recurrent/gated_delta.cuh"
#include "turbomind/backend/cuda/recurrent/recurrent_ops.h"
#include "turbomind/backend/cuda/recurrent/short_convolution.cuh"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {

void CudaShortConvolution(const Context& ctx, const ShortConvolutionParams& params) {
  Launch(ShortConvolutionKernel,
         {.grid_x = params.batch.num_seqs * CeilDiv(params.channels, 32),
          .threads = 32 * kConvolutionWarps},
         ctx.stream, params);
}

void CudaGatedDelta(const Context& ctx, const GatedDeltaParams& params) {
  const int64_t heads = int64_t{params.batch.num_seqs} * params.value_heads;
  const int64_t blocks = heads * CeilDiv(params.value_dim, 32);
  const auto launch = [&]<int kWarps>(std::integral_constant<int, kWarps>) {
    Launch(
        GatedDeltaKernel<kWarps>,
        {.grid_x = blocks, .threads = 32 * kWarps, .shared_bytes = 2 * sizeof(DeltaSums<kWarps>)},
        ctx.stream, params);
  };
  if (params.key_dim <= kDeltaWarps * kDeltaRows) {
    launch(std::integral_constant<int, kDeltaWarps>());
  } else {
    launch(std::integral_constant<int, 2 * kDeltaWarps>());
  }
}

void CudaGatedNorm(const Context& ctx, const GatedNormParams& params) {
  const int64_t runs = int64_t{params.num_rows} * (params.dim / params.group);
  Launch(GatedNormKernel,
         {.grid_x = CeilDiv(runs, kGatedNormWarps), .threads = 32 * kGatedNormWarps}, ctx.stream,
         params);
}

void CudaSigmoidGate(const Context& ctx, const SigmoidGateParams& params) {
  Launch(SigmoidGateKernel,
         {.grid_x = CeilDiv(params.count, kSigmoidThreads), .threads = kSigmoidThreads}, ctx.stream,
         params);
}

}  // namespace turbomind::cuda
