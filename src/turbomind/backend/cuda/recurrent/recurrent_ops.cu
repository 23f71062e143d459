#include <cstdint>
#include <type_traits>

#include "turbomind/backend/cuda/recurrent/gated_delta.cuh"
#include "turbomind/backend/cuda/recurrent/recurrent_ops.h"
#include "turbomind/backend/cuda/recurrent/selective_scan.cuh"
#include "turbomind/backend/cuda/recurrent/short_convolution.cuh"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {
namespace {

// Calls launch(kWarps, shape) for the grid of HeadState.
template <class F>
void ForWarps(const StateHeads& heads, const F& launch) {
  const auto with = [&]<int kWarps>(std::integral_constant<int, kWarps> warps) {
    launch(warps, LaunchShape{.grid_x = int64_t{heads.batch.num_seqs} * heads.value_heads *
                                        CeilDiv(heads.value_dim, 32),
                              .threads = 32 * kWarps});
  };
  if (heads.key_dim <= kStateWarps * kStateRows) {
    with(std::integral_constant<int, kStateWarps>());
  } else {
    with(std::integral_constant<int, 2 * kStateWarps>());
  }
}

}  // namespace

void CudaShortConvolution(const Context& ctx, const ShortConvolutionParams& params) {
  Launch(ShortConvolutionKernel,
         {.grid_x = params.batch.num_seqs * CeilDiv(params.channels, 32),
          .threads = 32 * kConvolutionWarps},
         ctx.stream, params);
}

void CudaGatedDelta(const Context& ctx, const GatedDeltaParams& params) {
  ForWarps(params.heads, [&]<int kWarps>(std::integral_constant<int, kWarps>, LaunchShape shape) {
    shape.shared_bytes = 2 * sizeof(DeltaSums<kWarps>);
    Launch(GatedDeltaKernel<kWarps>, shape, ctx.stream, params);
  });
}

void CudaSelectiveScan(const Context& ctx, const SelectiveScanParams& params) {
  ForWarps(params.heads, [&]<int kWarps>(std::integral_constant<int, kWarps>, LaunchShape shape) {
    shape.shared_bytes = sizeof(float[kWarps][kWarps][32]);
    Launch(SelectiveScanKernel<kWarps>, shape, ctx.stream, params);
  });
}

void CudaGatedNorm(const Context& ctx, const GatedNormParams& params) {
  const int64_t runs = int64_t{params.num_rows} * (params.dim / params.group);
  if (params.group >= kLongRun) {
    Launch(GatedNormKernel<true>,
           {.grid_x = runs,
            .threads = 32 * kGatedNormWarps,
            .shared_bytes = kGatedNormWarps * sizeof(float)},
           ctx.stream, params);
    return;
  }
  Launch(GatedNormKernel<false>,
         {.grid_x = CeilDiv(runs, kGatedNormWarps), .threads = 32 * kGatedNormWarps}, ctx.stream,
         params);
}

void CudaSigmoidGate(const Context& ctx, const SigmoidGateParams& params) {
  Launch(SigmoidGateKernel,
         {.grid_x = CeilDiv(params.count, kSigmoidThreads), .threads = kSigmoidThreads}, ctx.stream,
         params);
}

}  // namespace turbomind::cuda
