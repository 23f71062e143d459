#include <string>

#include "turbomind/backend/cuda/prefill/prefill_tiles.h"
#include "turbomind/backend/cuda/prefill/prefill_wide.cuh"
#include "turbomind/backend/cuda/prefill/prefill_wide.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr int kRows = PrefillWideConfig<DataType::kFloat16, 64>::kRows;  // of every configuration

template <class C>
void RunConfig(const Context& context, PrefillParams params) {
  static_assert(C::kRows == kRows);
  const LaunchShape shape = {.grid_x = SetPrefillTiles(C::kRows, &params),
                             .grid_y = params.num_heads,
                             .threads = C::kThreads,
                             .shared_bytes = C::kSharedBytes};
  Launch(PrefillWideKernel<C>, shape, context.stream, params);
}

template <DataType T>
void RunType(const Context& context, int head_dim, const PrefillParams& params) {
  switch (head_dim) {
    case 64:
      return RunConfig<PrefillWideConfig<T, 64>>(context, params);
    case 96:
      return RunConfig<PrefillWideConfig<T, 96>>(context, params);
    case 128:
      return RunConfig<PrefillWideConfig<T, 128>>(context, params);
    case 256:
      return RunConfig<PrefillWideConfig<T, 256>>(context, params);
    default:
      throw InternalError("prefill by warp groups has no kernel for head_dim " +
                          std::to_string(head_dim));
  }
}

}  // namespace

int64_t CountWideBlocks(const Context& context, int head_dim, const PrefillParams& params) {
  const bool has_kernel = head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
  constexpr size_t kMaxBytes = PrefillWideConfig<DataType::kFloat16, 64>::kMaxBytes + 1024;
  if (!context.has_warp_groups || context.deterministic || params.num_splits > 1 || !has_kernel ||
      context.gpu.shared_bytes_per_block < kMaxBytes) {
    return 0;
  }
  PrefillParams tiled = params;
  return int64_t{SetPrefillTiles(kRows, &tiled)} * params.num_heads;
}

void RunPrefillWide(const Context& context, DataType type, int head_dim,
                    const PrefillParams& params) {
  if (type == DataType::kBFloat16) {
    RunType<DataType::kBFloat16>(context, head_dim, params);
  } else {
    RunType<DataType::kFloat16>(context, head_dim, params);
  }
}

}  // namespace turbomind::cuda
