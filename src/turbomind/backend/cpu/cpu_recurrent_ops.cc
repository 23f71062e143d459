#include "turbomind/backend/cpu/cpu_recurrent_ops.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "turbomind/backend/cpu/parallel_rows.h"
#include "turbomind/core/ceil_div.h"

namespace turbomind {
namespace {

SequenceStep StepOf(const BatchView& batch, const StateBatch& states, int seq) {
  const std::span saves(states.saves, static_cast<size_t>(states.num_saves));
  const auto own = std::ranges::equal_range(saves, seq, {}, &StateSave::sequence);
  const int num_tokens = batch.cu_seqlens[seq + 1] - batch.cu_seqlens[seq];
  return {.slot = states.slots[seq],
          .first_token = batch.cu_seqlens[seq],
          .num_tokens = num_tokens,
          .is_first = batch.context_lens[seq] == num_tokens,
          .saves = own.data(),
          .num_saves = static_cast<int>(own.size())};
}

// Calls fn(item) for all items, in parallel unless they compute few values together.
template <class Fn>
void ForItems(ThreadPool& pool, int64_t num_items, int64_t num_values, Fn fn) {
  if (num_values >= kMinParallelValues) {
    pool.ParallelFor(num_items, [&](int64_t item, int) { fn(item); });
    return;
  }
  for (int64_t item = 0; item < num_items; ++item) {
    fn(item);
  }
}

// Calls fn(step, run) for runs of columns that cover the states of all heads and sequences.
template <class Fn>
void ForColumns(ThreadPool& pool, const StateHeads& p, Fn fn) {
  constexpr int64_t kItemsWanted = 4;  // for every thread
  const BatchView& batch = p.batch;
  const int64_t heads = p.value_heads;
  const int64_t groups = CeilDiv(p.value_dim, kMinColumnRun);
  const int64_t wanted = CeilDiv(kItemsWanted * pool.num_threads(), batch.num_seqs * heads);
  const int64_t columns = CeilDiv(groups, std::min(groups, wanted)) * kMinColumnRun;
  const int64_t runs = CeilDiv(p.value_dim, columns);
  const int64_t num_values = batch.num_tokens * heads * p.key_dim * p.value_dim;
  ForItems(pool, batch.num_seqs * heads * runs, num_values, [&](int64_t item) {
    const int64_t begin = item % runs * columns;
    const auto end = std::min<int64_t>(p.value_dim, begin + columns);
    fn(StepOf(batch, p.states, static_cast<int>(item / runs / heads)),
       ColumnRun{static_cast<int>(item / runs % heads), static_cast<int>(begin),
                 static_cast<int>(end)});
  });
}

}  // namespace

void CpuShortConvolution(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                         const ShortConvolutionParams& params) {
  const BatchView& batch = params.batch;
  const int64_t runs = CeilDiv(params.channels, kMaxChannelRun);
  const int64_t num_values = int64_t{batch.num_tokens} * params.channels;
  ForItems(pool, batch.num_seqs * runs, num_values, [&](int64_t item) {
    const auto begin = static_cast<int>(item % runs) * kMaxChannelRun;
    kernels.short_convolution(params, StepOf(batch, params.states, static_cast<int>(item / runs)),
                              {begin, std::min(params.channels, begin + kMaxChannelRun)});
  });
}

void CpuGatedDelta(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                   const GatedDeltaParams& params) {
  ForColumns(pool, params.heads, [&](const SequenceStep& step, const ColumnRun& run) {
    kernels.gated_delta(params, step, run);
  });
}

void CpuSelectiveScan(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                      const SelectiveScanParams& params) {
  ForColumns(pool, params.heads, [&](const SequenceStep& step, const ColumnRun& run) {
    kernels.selective_scan(params, step, run);
  });
}

namespace {

// Calls convert(rows) for pieces of all copies, and copy(state, checkpoint, num_bytes) for the
// values at the beginning of every layer, in parallel.
template <class Convert, class Copy>
void ForRows(ThreadPool& pool, const StateCopyParams& p, Convert convert, Copy copy_exact) {
  constexpr int64_t kRowsOfPiece = 256;
  const StateShape& shape = p.shape;
  const int64_t pieces = CeilDiv(shape.rows, kRowsOfPiece);
  pool.ParallelFor(p.num_copies * shape.num_layers * pieces, [&](int64_t item, int) {
    const StateCopy& copy = p.copies[item / pieces / shape.num_layers];
    const int64_t layer = item / pieces % shape.num_layers;
    const int64_t first = item % pieces * kRowsOfPiece;
    std::byte* state = reinterpret_cast<std::byte*>(p.states.At(copy.slot)) +
                       layer * shape.LayerBytes(StateFormat::kF32);
    std::byte* checkpoint = reinterpret_cast<std::byte*>(p.checkpoints.At(copy.checkpoint)) +
                            layer * shape.LayerBytes(p.format);
    const int64_t code_bytes = p.format == StateFormat::kInt8 ? 1 : 2;
    convert(StateRows{
        .values = reinterpret_cast<float*>(state + shape.exact_bytes) + first * shape.cols,
        .codes = checkpoint + shape.CodesOffset(p.format) + first * shape.cols * code_bytes,
        .scales = reinterpret_cast<float*>(checkpoint + shape.exact_bytes) + first,
        .num_rows = std::min(kRowsOfPiece, shape.rows - first),
        .cols = shape.cols,
        .format = p.format});
    if (first == 0) {
      copy_exact(state, checkpoint, static_cast<size_t>(shape.exact_bytes));
    }
  });
}

}  // namespace

void CpuSaveCheckpoints(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                        const StateCopyParams& params) {
  ForRows(pool, params, kernels.encode_state,
          [](const std::byte* state, std::byte* checkpoint, size_t num_bytes) {
            std::memcpy(checkpoint, state, num_bytes);
          });
}

void CpuRestoreCheckpoints(const CpuRecurrentKernels& kernels, ThreadPool& pool,
                           const StateCopyParams& params) {
  ForRows(pool, params, kernels.decode_state,
          [](std::byte* state, const std::byte* checkpoint, size_t num_bytes) {
            std::memcpy(state, checkpoint, num_bytes);
          });
}

}  // namespace turbomind
