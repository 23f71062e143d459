#include <memory>

#include "turbomind/backend/cuda/linear/linear_choice.h"
#include "turbomind/backend/cuda/linear/linear_copy.cuh"
#include "turbomind/backend/cuda/linear/linear_wide.cuh"
#include "turbomind/backend/cuda/linear/linear_wide.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

struct ProbeParams {
  int32_t* found;
};

__global__ void ProbeKernel(ProbeParams params) {
  BeginKernel();
  if (ThreadIndexX() == 0) {
    StoreGlobal(params.found, static_cast<int32_t>(kHasWarpGroups));
  }
}

// Tiles for up to this many rows, for experts on average. With even routing, at most half of the
// experts then need a second tile.
constexpr int kRowsOfSmallTile = 32;
constexpr int kRowsOfTile = 64;
constexpr int kMaxBlocksPerSm = 2;  // of all configurations

template <class C>
void RunWideKernel(const Context& ctx, const LinearKernelParams& linear,
                   const GatedActivationParams& gate, WideCounters& counters) {
  static_assert(C::kBlocksPerSm <= kMaxBlocksPerSm);
  WideParams params = {.linear = linear,
                       .x_cols = static_cast<int>(CeilDiv(linear.cols, kWideCols) * kWideCols),
                       .num_blocks = C::kBlocksPerSm * ctx.gpu.num_sms,
                       .gate = gate};
  params.output_blocks = static_cast<int>(CutOutputs(&params.linear, C::kOutputs));
  const int64_t x_bytes = CeilDiv(int64_t{linear.num_rows} * params.x_cols * 2, 256) * 256;
  const int64_t part_bytes = int64_t{2} * params.num_blocks * C::kSlotBytes;
  char* memory = static_cast<char*>(ctx.workspace->Get(static_cast<size_t>(x_bytes + part_bytes)));
  constexpr RowOrder kOrder = IsFp8(C::kFormat)           ? RowOrder::kWideFp8
                              : SplitsColumns(C::kFormat) ? RowOrder::kWideSplit
                                                          : RowOrder::kWide;
  CopyRows<kOrder>(ctx, linear, params.x_cols, memory);
  params.x_bfloat = reinterpret_cast<const uint16_t*>(memory);
  params.parts = memory + x_bytes;
  params.arrivals = counters.Get(ctx);
  Launch(WideKernel<C>,
         {.grid_x = params.num_blocks,
          .threads = C::kThreads,
          .shared_bytes = static_cast<size_t>(C::SharedBytes(linear.num_experts))},
         ctx.stream, params);
}

}  // namespace

bool ProbeWarpGroups(Stream stream) {
  const std::unique_ptr<void, void (*)(void*)> memory(AllocateGpu(sizeof(int32_t)), FreeGpu);
  int32_t found = 0;
  Launch(ProbeKernel, {}, stream, ProbeParams{static_cast<int32_t*>(memory.get())});
  CopyBytes(&found, memory.get(), sizeof(found), stream);
  Synchronize(stream);
  return found != 0;
}

WideCounters::~WideCounters() {
  if (memory_ != nullptr) {
    FreeGpu(memory_);
  }
}

int32_t* WideCounters::Get(const Context& ctx) {
  if (memory_ == nullptr) {
    const size_t num_bytes =
        static_cast<size_t>(kMaxBlocksPerSm * ctx.gpu.num_sms) * sizeof(int32_t);
    memory_ = static_cast<int32_t*>(AllocateGpu(num_bytes));
    ClearBytes(memory_, num_bytes, ctx.stream);
  }
  return memory_;
}

void RunWide(const Context& ctx, MatrixFormat stored, const LinearKernelParams& params,
             const GatedActivationParams& gate, WideCounters& counters) {
  const int64_t rows = RowsOfMatrix(params.num_rows, params.num_experts);
  DispatchMatrix(stored, [&]<MatrixFormat F>() {
    if constexpr (F != MatrixFormat::kF32) {
      constexpr MatrixFormat kStored = StoredFormat(F);
      if (rows <= kRowsOfSmallTile) {
        RunWideKernel<WideConfig<kStored, 32>>(ctx, params, gate, counters);
      } else if (rows <= kRowsOfTile) {
        RunWideKernel<WideConfig<kStored, 64>>(ctx, params, gate, counters);
      } else {
        RunWideKernel<WideConfig<kStored, 128>>(ctx, params, gate, counters);
      }
    } else {
      throw InternalError("FP32 weights have no products of BF16");
    }
  });
}

}  // namespace turbomind::cuda
