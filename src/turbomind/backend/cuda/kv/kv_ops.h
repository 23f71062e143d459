#pragma once

// ⑥⑦ Launchers of the CUDA kernels that write the KV cache and read it back as dense rows. All
// pointers are GPU addresses, including those of the batch; counts are read on the host. Work is
// queued on the context's stream. Launchers do not wait, allocate or depend on values in GPU
// memory, so every launch can be recorded in a graph.
//
// REQUIRES: a cache dtype of 16 bits; head_dim a multiple of 16, at most kMaxHeadDim. qkv, cos,
// sin, bias, norm weights and mean are 16-byte aligned dense rows.

#include <cstdint>

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/core/host_device.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Bit-identical to the CPU, except for which NaN a sum gives: qkv, q_dot_mean and the bytes of the
// cache. A token whose block id is -1 is neither stored nor counted.
void CudaWriteKv(const Context& context, const WriteKvParams& params);
// Entries of blocks_to_quantize without blocks (-1) are skipped.
void CudaQuantizeBlocks(const Context& context, const QuantizeBlocksParams& params);
// Bit-identical to the CPU.
void CudaFlattenKV(const Context& context, const FlattenKVParams& params);

// Positions [begin, end) of a sequence; empty if begin >= end.
struct PositionSpan {
  int32_t begin = 0;
  int32_t end = 0;
};

// The positions that at least one query of a chunk sees in each view of the cache
// (kv/precision_window.h). With a sliding window, some positions in between may be unseen.
//
// The rule alone decides which view the query at p reads at position t, including t = p. It reads
// the 16-bit window if t < SinkEnd() or t >= RecentBegin(p), and the quantized pool otherwise.
// `quantized` and `recent` overlap: at such positions older queries still read 16 bits and newer
// ones the quantized format.
struct SeenSpans {
  PositionSpan quantized;  // all positions if the rule is off
  PositionSpan sinks;      // 16-bit, the first blocks
  PositionSpan recent;     // 16-bit
};

// Return the spans of the queries at positions [first_query, context_len), which look back `window`
// positions (0: all).
SeenSpans SpansOf(const PrecisionWindow& rule, int window, int first_query, int context_len);

inline constexpr int kMaxFlattenSpans = 128;

// Destination of a span of one sequence.
struct FlattenSpan {
  int32_t sequence = 0;  // in the batch: the row of the block table
  int32_t begin = 0;     // first position
  int32_t row = 0;       // first output row
};

// Flattens one view of the cache into dense 16-bit rows for prefill. Prefill launches it once for
// the layer's pool. With a window it launches it once more for the window's pool, with other spans
// and another output.
//
// Format none: as stored (FP16 or BF16), unless all_half. All other formats give FP16:
//   FP4        E2M1 * scale, exact
//   FP8        the code's value, exact (below SM 89 an E4M3 NaN is read as 480)
//   int8, int4 code * scale + zero in FP32, rounded once to FP16, at most 65504 in magnitude
// FP4 and FP8 values are without the global scale. The reader applies it: in the softmax scale of
// the scores (K), and in the weights or the output (V), as AttentionParams specifies. A position
// whose block is -1 gives zeros.
//
// Keys with a K offset or a fast bias are different: the global scale is applied, both are added in
// FP32, and the sum is rounded once to FP16, at most 65504 in magnitude.
struct FlattenHalfParams {
  uint16_t* k = nullptr;  // [kv_heads, num_rows, head_dim], 16-byte aligned
  uint16_t* v = nullptr;  // same
  int64_t num_rows = 0;   // positions of all spans
  // At least one span. Their output rows are consecutive: 0, then the row after the previous span.
  FlattenSpan spans[kMaxFlattenSpans] = {};
  int num_spans = 0;
  KvLayerView kv;                         // the layer's pool or the window
  const int32_t* block_tables = nullptr;  // of that pool: [sequences, block_table_stride]
  int64_t block_table_stride = 0;
  FastBias fast_bias = {};  // of the view's heads
  bool all_half = false;    // BF16 is rounded to FP16, at most 65504 in magnitude
};
static_assert(sizeof(FlattenHalfParams) <= 4096);  // limit for kernel parameters

// REQUIRES: head_dim is at most 256.
void CudaFlattenToHalf(const Context& context, const FlattenHalfParams& params);

}  // namespace turbomind::cuda
