#include <string>

#include "turbomind/backend/cuda/prefill/prefill_attention.cuh"
#include "turbomind/backend/cuda/prefill/prefill_combine.cuh"
#include "turbomind/backend/cuda/prefill/prefill_launch.h"
#include "turbomind/backend/cuda/prefill/prefill_tiles.h"
#include "turbomind/backend/cuda/prefill/prefill_wide.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// With fewer blocks of warp groups per SM, the small tiles of the other kernel are faster anyway.
constexpr int kFewestBlocks = 4;  // SMs per block

template <class C>
void LaunchTiles(const Context& context, PrefillParams params) {
  const LaunchShape shape = {.grid_x = SetPrefillTiles(C::kRows, &params),
                             .grid_y = int64_t{params.num_heads} * params.num_splits,
                             .threads = kPrefillThreads,
                             .shared_bytes = C::kSharedBytes};
  Launch(PrefillKernel<C>, shape, context.stream, params);
}

// Larger tiles read less. Smaller tiles spread a short chunk over more of the GPU.
template <DataType T, int D>
void LaunchHeadDim(const Context& context, PrefillParams params) {
  using Small = PrefillConfig<T, D, 1>;
  if constexpr (D <= 128) {
    using Large = PrefillConfig<T, D, 2>;
    const GpuProperties& gpu = context.gpu;
    const int64_t blocks = int64_t{SetPrefillTiles(Large::kRows, &params)} * params.num_heads;
    if (params.num_splits == 1 && blocks >= kPrefillBlocks * gpu.num_sms &&
        size_t{Large::kSharedBytes} <= gpu.shared_bytes_per_block) {
      LaunchTiles<Large>(context, params);
      return;
    }
  }
  LaunchTiles<Small>(context, params);
  if (params.num_splits > 1) {
    Launch(PrefillCombineKernel<D>,
           {.grid_x = CeilDiv(params.num_rows, kPrefillCombineWarps),
            .threads = 32 * kPrefillCombineWarps},
           context.stream, params);
  }
}

template <DataType T>
void LaunchType(const Context& context, int head_dim, const PrefillParams& params) {
  switch (head_dim) {
    case 64:
      return LaunchHeadDim<T, 64>(context, params);
    case 80:
      return LaunchHeadDim<T, 80>(context, params);
    case 96:
      return LaunchHeadDim<T, 96>(context, params);
    case 128:
      return LaunchHeadDim<T, 128>(context, params);
    case 256:
      return LaunchHeadDim<T, 256>(context, params);
    default:
      throw InternalError("prefill attention has no kernel for head_dim " +
                          std::to_string(head_dim));
  }
}

}  // namespace

PrefillUse FindPrefillUse(const Context& context, DataType type, int head_dim,
                          const PrefillParams& params) {
  const int64_t blocks = CountWideBlocks(context, head_dim, params);
  return {blocks > 0 && blocks * kFewestBlocks >= context.gpu.num_sms,
          {type, head_dim, blocks >= context.gpu.num_sms}};
}

void LaunchPrefill(const Context& context, const PrefillChoices& choices, DataType type,
                   int head_dim, const PrefillParams& params) {
  const PrefillUse use = FindPrefillUse(context, type, head_dim, params);
  if (use.has_choice && choices.Get(use.question) == PrefillProducts::kWarpGroups) {
    RunPrefillWide(context, type, head_dim, params);
  } else if (type == DataType::kBFloat16) {
    LaunchType<DataType::kBFloat16>(context, head_dim, params);
  } else {
    LaunchType<DataType::kFloat16>(context, head_dim, params);
  }
}

}  // namespace turbomind::cuda
