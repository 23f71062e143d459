// Compiled without contraction of products and sums, so that codes have the bits of the CPU.

#include "turbomind/backend/cuda/recurrent/recurrent_ops.h"
#include "turbomind/backend/cuda/recurrent/state_codec.cuh"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {
namespace {

// Launches the kernel for every copy, and copies the values that both slots have as they are. The
// copies are few and on the host.
void ForCopies(const Context& ctx, const StateCopyParams& p, void (*kernel)(StateCodecParams),
               bool is_save) {
  const StateShape& shape = p.shape;
  for (int i = 0; i < p.num_copies; ++i) {
    const StateCodecParams copy = {
        .state = reinterpret_cast<std::byte*>(p.states.At(p.copies[i].slot)),
        .checkpoint = reinterpret_cast<std::byte*>(p.checkpoints.At(p.copies[i].checkpoint)),
        .shape = shape,
        .format = p.format};
    Launch(kernel,
           {.grid_x = CeilDiv(shape.num_layers * shape.rows, kCodecWarps),
            .threads = 32 * kCodecWarps},
           ctx.stream, copy);
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      std::byte* state = copy.state + layer * shape.LayerBytes(StateFormat::kF32);
      std::byte* checkpoint = copy.checkpoint + layer * shape.LayerBytes(p.format);
      CopyBytes(is_save ? checkpoint : state, is_save ? state : checkpoint,
                static_cast<size_t>(shape.exact_bytes), ctx.stream);
    }
  }
}

}  // namespace

void CudaSaveCheckpoints(const Context& ctx, const StateCopyParams& params) {
  ForCopies(ctx, params, EncodeStateKernel, true);
}

void CudaRestoreCheckpoints(const Context& ctx, const StateCopyParams& params) {
  ForCopies(ctx, params, DecodeStateKernel, false);
}

}  // namespace turbomind::cuda
