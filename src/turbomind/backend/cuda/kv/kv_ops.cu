#include <algorithm>

#include "turbomind/backend/cuda/kv/kv_flatten.cuh"
#include "turbomind/backend/cuda/kv/kv_ops.h"
#include "turbomind/backend/cuda/kv/kv_quantize.cuh"
#include "turbomind/backend/cuda/kv/kv_write.cuh"
#include "turbomind/backend/cuda/kv/latent_rows.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind::cuda {
namespace {

// Call fn.operator()<row lanes, dtype>() with enough lanes, of eight values each, to cover a row.
template <int kMaxLanes = kMaxHeadDim / kLaneValues, class F>
void DispatchRows(const KvLayerView& kv, F&& fn) {
  Check(kv.head_dim > 0 && kv.head_dim % 16 == 0 && kv.head_dim <= kMaxLanes * kLaneValues,
        "head_dim must be a multiple of 16, and the kernel must have enough lanes");
  Check(kv.dtype != DataType::kFloat32, "the cache dtype must have 16 bits");
  const auto with_lanes = [&]<DataType T>() {
    if (kv.head_dim <= 8 * kLaneValues) {
      fn.template operator()<8, T>();
    } else if (kv.head_dim <= 16 * kLaneValues) {
      fn.template operator()<16, T>();
    } else if (kv.head_dim <= 32 * kLaneValues) {
      fn.template operator()<32, T>();
    } else if constexpr (kMaxLanes > 32) {
      fn.template operator()<kMaxLanes, T>();
    }
  };
  if (kv.dtype == DataType::kBFloat16) {
    with_lanes.template operator()<DataType::kBFloat16>();
  } else {
    with_lanes.template operator()<DataType::kFloat16>();
  }
}

// Store the offset of each block and head.
void StoreOffsets(const Context& context, const QuantizeBlocksParams& params) {
  const int64_t offsets = static_cast<int64_t>(params.num_to_quantize) * params.kv.kv_heads;
  DispatchRows(params.kv, [&]<int kRowLanes, DataType T>() {
    Launch(StoreKOffsetsKernel<kRowLanes, T>,
           {.grid_x = CeilDiv(offsets, int64_t{OffsetsOfBlock(kRowLanes)}),
            .threads = kWriteThreads,
            .shared_bytes = OffsetBytes(kRowLanes)},
           context.stream, params);
  });
}

}  // namespace

void CudaWriteKv(const Context& context, const WriteKvParams& params) {
  DispatchRows(params.kv, [&]<int kRowLanes, DataType T>() {
    const auto blocks = [&](int heads) {
      const int64_t rows = static_cast<int64_t>(params.batch.num_tokens) * heads;
      return static_cast<int>(CeilDiv(rows, int64_t{RowsOfBlock(kRowLanes)}));
    };
    WriteKvLaunch launch;
    launch.op = params;
    launch.q_blocks = blocks(params.q_heads);
    launch.kv_blocks = params.only_queries ? 0 : blocks(params.kv.kv_heads);
    if (params.rotate) {
      launch.rotation_size = RotationSize(params.kv.head_dim);
    }
    Launch(WriteKvKernel<kRowLanes, T>,
           {.grid_x = launch.q_blocks + 2 * int64_t{launch.kv_blocks}, .threads = kWriteThreads},
           context.stream, launch);
  });
}

void CudaQuantizeBlocks(const Context& context, const QuantizeBlocksParams& params) {
  if (params.kv.HasKOffset()) {
    StoreOffsets(context, params);
  }
  if (params.kv.HasLatents()) {
    CudaQuantizeLatents(context, params);
    return;
  }
  DispatchRows(params.kv, [&]<int kRowLanes, DataType T>() {
    const int64_t rows =
        static_cast<int64_t>(params.num_to_quantize) * params.kv.kv_heads * params.kv.block_seq_len;
    QuantizeLaunch launch;
    launch.op = params;
    launch.side_blocks = static_cast<int>(CeilDiv(rows, int64_t{RowsOfBlock(kRowLanes)}));
    Launch(QuantizeBlocksKernel<kRowLanes, T>,
           {.grid_x = 2 * int64_t{launch.side_blocks}, .threads = kWriteThreads}, context.stream,
           launch);
  });
}

void CudaFlattenKV(const Context& context, const FlattenKVParams& params) {
  if (params.kv.HasLatents()) {
    CudaFlattenLatents(context, params);
    return;
  }
  DispatchRows(params.kv, [&]<int kRowLanes, DataType T>() {
    const int64_t rows =
        static_cast<int64_t>(params.batch.num_seqs) * params.kv.kv_heads * params.max_len;
    Launch(FlattenKernel<kRowLanes, T>,
           {.grid_x = CeilDiv(rows, int64_t{RowsOfBlock(kRowLanes)}),
            .grid_y = 2,
            .threads = kWriteThreads},
           context.stream, params);
  });
}

SeenSpans SpansOf(const PrecisionWindow& rule, int window, int first_query, int context_len) {
  const int begin = FirstVisible(window, first_query);
  if (!rule.enabled()) {
    return {.quantized = {begin, context_len}, .sinks = {}, .recent = {}};
  }
  const int oldest = rule.RecentBegin(first_query);
  const int newest = rule.RecentBegin(context_len - 1);
  return {.quantized = {std::max(begin, rule.SinkEnd()), newest},
          .sinks = {begin, std::min(rule.SinkEnd(), context_len)},
          .recent = {std::max(begin, oldest), context_len}};
}

void CudaFlattenToHalf(const Context& context, const FlattenHalfParams& params) {
  DispatchRows<32>(params.kv, [&]<int kRowLanes, DataType T>() {
    Launch(FlattenHalfKernel<kRowLanes, T>,
           {.grid_x = CeilDiv(params.num_rows, int64_t{FlattenRowsOfBlock(kRowLanes)}),
            .grid_y = 2 * int64_t{params.kv.kv_heads},
            .threads = kWriteThreads},
           context.stream, params);
  });
}

}  // namespace turbomind::cuda
