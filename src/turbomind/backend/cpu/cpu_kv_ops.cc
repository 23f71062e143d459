#include "turbomind/backend/cpu/cpu_kv_ops.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>
#include <span>
#include <vector>

#include "turbomind/core/check.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind {
namespace {

// Sequence s holds the items [starts[s], starts[s + 1]).
template <class Starts>
int SequenceOf(const Starts& starts, int64_t item) {
  return static_cast<int>(std::upper_bound(starts.begin(), starts.end(), item) - starts.begin()) -
         1;
}

KvHead HeadOf(const AttentionParams& p, int seq, int head) {
  return {&p.kv, p.batch.block_tables + seq * p.batch.block_table_stride, head};
}

KvHead Window16HeadOf(const AttentionParams& p, int seq, int head) {
  if (p.window16.data == nullptr) {
    return {};
  }
  return {&p.window16, p.batch.window16_tables + seq * p.batch.block_table_stride, head};
}

float GlobalScale(const KvLayerView& kv, KvSide side, int head) {
  const float* global_scale = kv.global_scale[static_cast<int>(side)];
  return global_scale != nullptr ? global_scale[head] : 1.f;
}

void AddTo(int64_t* counter, int64_t found) {
  if (counter != nullptr && found != 0) {
    __atomic_fetch_add(counter, found, __ATOMIC_RELAXED);
  }
}

}  // namespace

float* CpuKvScratch::Get(int64_t num_floats) {
  const auto wanted = static_cast<size_t>(num_floats);
  if (wanted > size_) {
    Free();
    const size_t size = std::bit_ceil(wanted);
    floats_ = static_cast<float*>(::operator new(size * sizeof(float), kAlignment));
    size_ = size;
  }
  return floats_;
}

void CpuKvScratch::Free() {
  ::operator delete(floats_, kAlignment);
  floats_ = nullptr;
  size_ = 0;
}

CpuKvKernels CpuKvKernelsFor(std::string_view isa) {
  CpuKvKernels kernels;
  if (isa == "scalar") {
    scalar::FillKvKernels(kernels);
  } else if (isa == "avx2") {
    avx2::FillKvKernels(kernels);
  } else if (isa == "avx512") {
    avx512::FillKvKernels(kernels);
  } else if (isa == "amx") {
    amx::FillKvKernels(kernels);
  } else {
    throw InvalidArgument(
        "isa", "is \"" + std::string(isa) + "\". It must be scalar, avx2, avx512 or amx.");
  }
  return kernels;
}

void CpuWriteKv(const CpuKvKernels& kernels, ThreadPool& pool, const WriteKvParams& params) {
  constexpr int64_t kHeadsPerItem = 8;
  const BatchView& batch = params.batch;
  const int32_t* const tables =
      params.window16.data != nullptr ? batch.window16_tables : batch.block_tables;
  const int kv_heads = params.kv.kv_heads;
  const std::span starts(batch.cu_seqlens, static_cast<size_t>(batch.num_seqs) + 1);
  const int64_t num_heads = static_cast<int64_t>(batch.num_tokens) * kv_heads;
  std::atomic<int64_t> num_nonfinite{0};
  std::atomic<int64_t> num_clipped{0};
  pool.ParallelFor((num_heads + kHeadsPerItem - 1) / kHeadsPerItem, [&](int64_t item, int) {
    RowCounts found;
    const int64_t end = std::min(num_heads, (item + 1) * kHeadsPerItem);
    for (int64_t i = item * kHeadsPerItem; i < end; ++i) {
      WriteHeadArgs args;
      args.params = &params;
      args.token = static_cast<int>(i / kv_heads);
      args.head = static_cast<int>(i % kv_heads);
      const int32_t* table = tables + SequenceOf(starts, args.token) * batch.block_table_stride;
      const int position = batch.positions[args.token];
      args.block = table[position / params.kv.block_seq_len];
      args.slot = position % params.kv.block_seq_len;
      args.q_scale = params.query_scaling.At(position);
      const RowCounts counts = kernels.write_head(args);
      found.nonfinite += counts.nonfinite;
      found.clipped += counts.clipped;
    }
    if (found.nonfinite != 0) {
      num_nonfinite.fetch_add(found.nonfinite, std::memory_order_relaxed);
    }
    if (found.clipped != 0) {
      num_clipped.fetch_add(found.clipped, std::memory_order_relaxed);
    }
  });
  AddTo(params.num_nonfinite, num_nonfinite.load());
  AddTo(params.num_clipped, num_clipped.load());
}

void CpuQuantizeBlocks(const CpuKvKernels& kernels, ThreadPool& pool,
                       const QuantizeBlocksParams& params) {
  const KvLayerView& kv = params.kv;
  const KvLayerView& window16 = params.window16;
  const int64_t num_items = static_cast<int64_t>(params.num_to_quantize) * kv.kv_heads * 2;
  pool.ParallelFor(num_items, [&](int64_t item, int) {
    const KvSide side = item % 2 == 0 ? KvSide::kK : KvSide::kV;
    const int s = static_cast<int>(side);
    const int head = static_cast<int>(item / 2 % kv.kv_heads);
    const PendingQuantization& pending = params.blocks_to_quantize[item / 2 / kv.kv_heads];
    if (kv.format[s] == KvCacheMode::kNone) {
      std::memcpy(kv.Payload(side, pending.quantized, head),
                  window16.Payload(side, pending.window16, head),
                  static_cast<size_t>(kv.row_bytes[s]) * kv.block_seq_len);
      return;
    }
    const int dim = kv.Dim(side);
    const RowFormat from = {window16.format[s], dim, window16.dtype, 1.f, false};
    const RowFormat to = {kv.format[s], dim, kv.dtype, GlobalScale(kv, side, head),
                          params.search_scales};
    float base[kMaxHeadDim];
    const bool has_base = window16.HasOffset(side);
    if (has_base) {
      DecodeKOffset(window16, pending.window16, head, base);
    }
    const auto read = [&](int slot, float* row) {
      const KvRow at = window16.Row(side, pending.window16, head, slot);
      kernels.decode_row(from, at.payload, at.metadata, row);
      for (int d = 0; has_base && d < dim; ++d) {
        row[d] += base[d];
      }
    };
    const bool has_offset = kv.HasOffset(side);
    float row[kMaxHeadDim];
    float offset[kMaxHeadDim] = {};
    if (has_offset) {
      float run[kMaxHeadDim];
      for (int slot = 0; slot < kv.block_seq_len; ++slot) {
        read(slot, row);
        AddToKOffset(row, slot, dim, kv.dtype, run, offset);
      }
      StoreKOffset(kv.KOffset(pending.quantized, head), dim, kv.dtype, kv.block_seq_len, offset);
    }
    int clipped = 0;
    for (int slot = 0; slot < kv.block_seq_len; ++slot) {
      read(slot, row);
      for (int d = 0; has_offset && d < dim; ++d) {
        row[d] -= offset[d];
      }
      const KvRow at = kv.Row(side, pending.quantized, head, slot);
      // NaN and infinities were counted before.
      clipped += kernels.encode_row(to, row, at.payload, at.metadata).clipped;
    }
    AddTo(params.num_clipped, clipped);
  });
}

void CpuFlattenKV(const CpuKvKernels& kernels, ThreadPool& pool, const FlattenKVParams& params) {
  const BatchView& batch = params.batch;
  const int kv_heads = params.kv.kv_heads;
  const int64_t num_items = static_cast<int64_t>(batch.num_seqs) * kv_heads * 2;
  pool.ParallelFor(num_items, [&](int64_t item, int) {
    const KvSide side = item % 2 == 0 ? KvSide::kK : KvSide::kV;
    const int head = static_cast<int>(item / 2 % kv_heads);
    const int seq = static_cast<int>(item / 2 / kv_heads);
    const int dim = params.kv.Dim(side);
    const int64_t row = seq * batch.block_table_stride;
    const int context = batch.context_lens[seq];
    float* out = (side == KvSide::kK ? params.k : params.v) +
                 item / 2 * static_cast<int64_t>(params.max_len) * dim;
    float offset[kMaxHeadDim] = {};
    for (int t = 0; t < context; ++t, out += dim) {
      const int index = t / params.kv.block_seq_len;
      const bool is_in_window16 =
          params.window16.data != nullptr && params.rule.IsInWindow16(index, context - 1);
      const KvLayerView& kv = is_in_window16 ? params.window16 : params.kv;
      const int64_t block =
          (is_in_window16 ? batch.window16_tables : batch.block_tables)[row + index];
      if (block < 0) {
        std::fill_n(out, dim, 0.f);
        continue;
      }
      const KvRow at = kv.Row(side, block, head, t % kv.block_seq_len);
      kernels.decode_row(
          {kv.format[static_cast<int>(side)], dim, kv.dtype, GlobalScale(kv, side, head), false},
          at.payload, at.metadata, out);
      if (kv.HasOffset(side)) {
        DecodeKOffset(kv, block, head, offset);
        for (int d = 0; d < dim; ++d) {
          out[d] += offset[d];
        }
      }
    }
  });
}

void CpuPrefillAttention(const CpuKvKernels& kernels, ThreadPool& pool, CpuKvScratch& memory,
                         const AttentionParams& params) {
  const KvLayerView& kv = params.kv;
  const BatchView& batch = params.batch;
  const int group = params.q_heads / kv.kv_heads;
  const int tokens_per_item = std::max(1, kernels.item_rows / group);
  std::vector<int64_t>& starts = memory.starts;
  starts.assign(1, 0);
  for (int seq = batch.num_decode; seq < batch.num_seqs; ++seq) {
    const int64_t tokens = batch.cu_seqlens[seq + 1] - batch.cu_seqlens[seq];
    starts.push_back(starts.back() +
                     (tokens + tokens_per_item - 1) / tokens_per_item * kv.kv_heads);
  }
  const int64_t scratch_floats =
      (PrefillScratchFloats(tokens_per_item * group, kv.head_dim) + 15) / 16 * 16;
  float* const scratch = memory.Get(scratch_floats * pool.num_threads());
  const int64_t num_items = starts.back();
  pool.ParallelFor(num_items, [&](int64_t reversed, int worker) {
    const int64_t item = num_items - 1 - reversed;  // starts with the longest items of a sequence
    const int seq = batch.num_decode + SequenceOf(starts, item);
    const int64_t local = item - starts[seq - batch.num_decode];
    const int head = static_cast<int>(local % kv.kv_heads);
    const int first = static_cast<int>(local / kv.kv_heads) * tokens_per_item;
    const int new_tokens = batch.cu_seqlens[seq + 1] - batch.cu_seqlens[seq];
    const int64_t token = batch.cu_seqlens[seq] + first;
    PrefillRowsArgs args;
    args.kv = HeadOf(params, seq, head);
    args.window16 = Window16HeadOf(params, seq, head);
    args.rule = params.rule;
    args.q = params.q + token * params.q_stride + static_cast<int64_t>(head) * group * kv.head_dim;
    args.q_stride = params.q_stride;
    args.out_stride = static_cast<int64_t>(params.q_heads) * kv.head_dim;
    args.out =
        params.out + token * args.out_stride + static_cast<int64_t>(head) * group * kv.head_dim;
    args.num_tokens = std::min(tokens_per_item, new_tokens - first);
    args.position = batch.positions[token];
    args.context_len = batch.context_lens[seq];
    args.group = group;
    args.softmax_scale = params.softmax_scale;
    args.score_cap = params.score_cap;
    args.exact = params.exact;
    args.window = params.window;
    args.sinks = params.sinks != nullptr ? params.sinks + head * group : nullptr;
    args.q_dot_mean_stride = params.q_heads;
    args.q_dot_mean = params.q_dot_mean != nullptr
                          ? params.q_dot_mean + token * params.q_heads + head * group
                          : nullptr;
    args.fast_bias = params.fast_bias;
    args.scratch = scratch + worker * scratch_floats;
    kernels.prefill_rows(args);
  });
}

namespace {

// Splits are distributed in runs of adjacent splits. The runs are short enough to balance the
// threads, and long enough to read ahead and to prepare a query for several splits.
constexpr int kRunsPerThread = 8;
constexpr int64_t kMaxSplitsPerRun = 16;

// Returns the arguments for the splits of [first, *last) that belong to the first one's sequence
// and head. Sets *last to their end. `starts` is the one of CpuDecodeAttention.
DecodeSplitsArgs DecodeArgs(const AttentionParams& params, const std::vector<int64_t>& starts,
                            int64_t first, int64_t* last) {
  const KvLayerView& kv = params.kv;
  const BatchView& batch = params.batch;
  const int seq = SequenceOf(starts, first);
  const int64_t num_splits = (starts[seq + 1] - starts[seq]) / kv.kv_heads;
  const int64_t local = first - starts[seq];
  const int head = static_cast<int>(local / num_splits);
  *last = std::min(*last, starts[seq] + (head + 1) * num_splits);
  const int context = batch.context_lens[seq];
  const int begin = FirstVisible(params.window, context - 1);
  const int64_t split = begin / kSplitTokens + local % num_splits;
  DecodeSplitsArgs args;
  args.kv = HeadOf(params, seq, head);
  args.window16 = Window16HeadOf(params, seq, head);
  args.rule = params.rule;
  args.group = params.q_heads / kv.kv_heads;
  args.q = params.q + batch.cu_seqlens[seq] * params.q_stride +
           static_cast<int64_t>(head) * args.group * kv.head_dim;
  args.softmax_scale = params.softmax_scale;
  args.score_cap = params.score_cap;
  args.exact = params.exact;
  args.fast_bias = params.fast_bias;
  args.position = context - 1;
  args.begin = std::max(begin, static_cast<int>(split * kSplitTokens));
  args.end = static_cast<int>(
      std::min(int64_t{context}, (split + (*last - first)) * int64_t{kSplitTokens}));
  return args;
}

}  // namespace

void CpuDecodeAttention(const CpuKvKernels& kernels, ThreadPool& pool, CpuKvScratch& memory,
                        const AttentionParams& params) {
  const KvLayerView& kv = params.kv;
  const BatchView& batch = params.batch;
  const int group = params.q_heads / kv.kv_heads;
  const int64_t head_stride = kStateHeader + kv.head_dim;
  const int64_t split_stride = head_stride * group;
  std::vector<int64_t>& starts = memory.starts;  // in splits, over all KV heads
  starts.assign(1, 0);
  for (int seq = 0; seq < batch.num_decode; ++seq) {
    const int end = batch.context_lens[seq];
    const int64_t first = FirstVisible(params.window, end - 1) / kSplitTokens;
    const int64_t last = (end + kSplitTokens - 1) / kSplitTokens;
    starts.push_back(starts.back() + (last - first) * kv.kv_heads);
  }
  float* const states = memory.Get(starts.back() * split_stride);
  const int64_t total = starts.back();
  const int64_t run =
      std::clamp(total / (pool.num_threads() * kRunsPerThread), int64_t{1}, kMaxSplitsPerRun);
  pool.ParallelFor((total + run - 1) / run, [&](int64_t i, int) {
    const int64_t end = std::min(total, (i + 1) * run);
    for (int64_t first = i * run; first < end;) {
      int64_t last = end;
      DecodeSplitsArgs args = DecodeArgs(params, starts, first, &last);
      args.states = states + first * split_stride;
      kernels.decode_splits(args);
      first = last;
    }
  });
  const auto merge = [&](int64_t i, int) {
    const int seq = static_cast<int>(i / params.q_heads);
    const int q_head = static_cast<int>(i % params.q_heads);
    const int head = q_head / group;
    MergeSplitsArgs args;
    args.num_splits = static_cast<int>((starts[seq + 1] - starts[seq]) / kv.kv_heads);
    args.states = states + (starts[seq] + head * args.num_splits) * split_stride +
                  (q_head % group) * head_stride;
    args.state_stride = split_stride;
    args.head_dim = kv.head_dim;
    args.sink = params.sinks != nullptr ? params.sinks + q_head : nullptr;
    if (params.q_dot_mean != nullptr) {
      const int64_t row = batch.cu_seqlens[seq] * static_cast<int64_t>(params.q_heads) + q_head;
      args.sink_shift = params.softmax_scale * params.q_dot_mean[row];
    }
    args.value_scale = params.window16.data != nullptr ? 1.f : GlobalScale(kv, KvSide::kV, head);
    args.out =
        params.out +
        (batch.cu_seqlens[seq] * static_cast<int64_t>(params.q_heads) + q_head) * kv.head_dim;
    kernels.merge_splits(args);
  };
  // Merging is short, so a second parallel section pays only for many splits.
  const int64_t num_outputs = static_cast<int64_t>(batch.num_decode) * params.q_heads;
  if (starts.back() < 64) {
    for (int64_t i = 0; i < num_outputs; ++i) {
      merge(i, 0);
    }
  } else {
    pool.ParallelFor(num_outputs, merge);
  }
}

}  // namespace turbomind
