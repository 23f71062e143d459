#include "turbomind/backend/cpu/cpu_latent_ops.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/core/ceil_div.h"

namespace turbomind {

void CpuWriteLatents(const CpuKvKernels& kernels, ThreadPool& pool,
                     const WriteLatentsParams& params) {
  const BatchView& batch = params.batch;
  const int32_t* tables =
      params.window16.data != nullptr ? batch.window16_tables : batch.block_tables;
  const std::span starts(batch.cu_seqlens, static_cast<size_t>(batch.num_seqs) + 1);
  std::atomic<int64_t> num_nonfinite{0};
  std::atomic<int64_t> num_clipped{0};
  pool.ParallelFor(batch.num_tokens, [&](int64_t token, int) {
    const auto seq = std::upper_bound(starts.begin(), starts.end(), token) - starts.begin() - 1;
    const int position = batch.positions[token];
    const int32_t* table = tables + seq * batch.block_table_stride;
    const RowCounts counts =
        kernels.write_latent({.params = &params,
                              .token = static_cast<int>(token),
                              .block = table[position / params.kv.block_seq_len],
                              .slot = position % params.kv.block_seq_len});
    num_nonfinite.fetch_add(counts.nonfinite, std::memory_order_relaxed);
    num_clipped.fetch_add(counts.clipped, std::memory_order_relaxed);
  });
  __atomic_fetch_add(params.num_nonfinite, num_nonfinite.load(), __ATOMIC_RELAXED);
  if (params.num_clipped != nullptr) {
    __atomic_fetch_add(params.num_clipped, num_clipped.load(), __ATOMIC_RELAXED);
  }
}

namespace {

// Query rows of an item. More rows expand a tile less often; fewer balance the threads better.
constexpr int kItemRows = 128;
constexpr int64_t kItemsPerThread = 8;  // of decode
constexpr int64_t kMaxSplitsPerItem = 8;

// A part of a sequence's query rows, over all positions (prompts) or over some splits (decode).
struct Item {
  int seq = 0;
  int token = 0;  // of the step: the first one of the rows
  int first_row = 0;
  int num_rows = 0;
  int first_split = -1;  // decode
  int last_split = 0;    // decode: behind them
  int64_t states = 0;    // decode: its first block in the states of the call
};

class LatentCall {
 public:
  LatentCall(const CpuKvKernels& kernels, ThreadPool& pool, const LatentAttentionParams& params)
      : kernels_(kernels),
        pool_(pool),
        params_(params),
        rank_(params.kv.head_dim),
        state_floats_(LatentStateFloats(rank_)) {}

  void Run(CpuKvScratch& memory) {
    PlanDecode();
    PlanPrompts();
    const int64_t scratch = CeilDiv(LatentScratchFloats(max_rows_, rank_, params_.kv.rotary_dim) +
                                        2 * CeilDiv(max_rows_, kLatentLanes) * state_floats_,
                                    int64_t{kLatentLanes}) *
                            kLatentLanes;
    states_ = memory.Get(num_states_ * state_floats_ + pool_.num_threads() * scratch);
    float* first = states_ + num_states_ * state_floats_;
    pool_.ParallelFor(static_cast<int64_t>(items_.size()), [&](int64_t i, int worker) {
      RunItem(items_[static_cast<size_t>(i)], first + worker * scratch);
    });
    pool_.ParallelFor(static_cast<int64_t>(merges_.size()),
                      [&](int64_t i, int) { Merge(merges_[static_cast<size_t>(i)]); });
  }

 private:
  int NumSplits(int seq) const {
    return static_cast<int>(CeilDiv(params_.batch.context_lens[seq], kSplitTokens));
  }

  void Add(const Item& item) {
    items_.push_back(item);
    max_rows_ = std::max(max_rows_, item.num_rows);
  }

  // Cuts decoding sequences into splits, and into runs of heads if there are few splits.
  void PlanDecode() {
    const BatchView& batch = params_.batch;
    int64_t splits = 0;
    for (int seq = 0; seq < batch.num_decode; ++seq) {
      splits += NumSplits(seq);
    }
    if (splits == 0) {
      return;
    }
    const int64_t wanted = pool_.num_threads() * kItemsPerThread;
    const int64_t parts = CeilDiv(wanted, splits);
    const int64_t blocks = CeilDiv(params_.q_heads, kLatentLanes);
    const int rows = kLatentLanes * static_cast<int>(CeilDiv(blocks, parts));
    const int run = static_cast<int>(std::clamp(splits / wanted, int64_t{1}, kMaxSplitsPerItem));
    for (int seq = 0; seq < batch.num_decode; ++seq) {
      for (int first = 0; first < params_.q_heads; first += rows) {
        Item item = {.seq = seq,
                     .token = batch.cu_seqlens[seq],
                     .first_row = first,
                     .num_rows = std::min(rows, params_.q_heads - first),
                     .states = num_states_};
        merges_.push_back(item);
        for (int split = 0; split < NumSplits(seq); split += run) {
          item.first_split = split;
          item.last_split = std::min(split + run, NumSplits(seq));
          item.states = num_states_;
          num_states_ += (item.last_split - split) * CeilDiv(item.num_rows, kLatentLanes);
          Add(item);
        }
      }
    }
  }

  // Cuts prompts into runs of tokens, the ones with the longest context first.
  void PlanPrompts() {
    const BatchView& batch = params_.batch;
    const int tokens = std::max(1, kItemRows / params_.q_heads);
    for (int seq = batch.num_decode; seq < batch.num_seqs; ++seq) {
      const int begin = batch.cu_seqlens[seq];
      const int end = batch.cu_seqlens[seq + 1];
      for (int last = end; last > begin; last -= tokens) {
        const int first = std::max(begin, last - tokens);
        Add({.seq = seq, .token = first, .num_rows = (last - first) * params_.q_heads});
      }
    }
  }

  LatentRows RowsOf(const Item& item) const {
    return {.q = params_.q + item.token * params_.q_stride,
            .q_stride = params_.q_stride,
            .rotary = params_.q_rotary + item.token * params_.q_rotary_stride,
            .rotary_stride = params_.q_rotary_stride,
            .rotary_head_stride = params_.q_rotary_head_stride,
            .heads = params_.q_heads,
            .first_row = item.first_row,
            .num_rows = item.num_rows,
            .rotate = params_.rotate};
  }

  void RunItem(const Item& item, float* scratch) const {
    const BatchView& batch = params_.batch;
    const int64_t table = item.seq * batch.block_table_stride;
    LatentSplitsArgs args;
    args.kv = {&params_.kv, batch.block_tables + table, 0};
    if (params_.window16.data != nullptr) {
      args.window16 = {&params_.window16, batch.window16_tables + table, 0};
    }
    args.rule = params_.rule;
    args.rows = RowsOf(item);
    args.position = batch.positions[item.token];
    args.softmax_scale = params_.softmax_scale;
    args.exact = params_.exact;
    const int last_row = item.first_row + item.num_rows - 1;
    args.end = args.position + last_row / params_.q_heads + 1;
    args.scratch = scratch;
    if (item.first_split >= 0) {
      args.begin = item.first_split * kSplitTokens;
      args.end = std::min(args.end, item.last_split * kSplitTokens);
      args.states = states_ + item.states * state_floats_;
      kernels_.latent_splits(args);
      return;
    }
    const int64_t floats = args.rows.num_blocks() * state_floats_;
    args.states = scratch;
    args.later = args.states + floats;
    args.scratch = args.later + floats;
    kernels_.latent_splits(args);
    Write(item, args.states);
  }

  void Merge(const Item& item) const {
    const int blocks = RowsOf(item).num_blocks();
    float* total = states_ + item.states * state_floats_;
    for (int split = 1; split < NumSplits(item.seq); ++split) {
      kernels_.latent_merge({.states = total,
                             .later = total + split * blocks * state_floats_,
                             .num_blocks = blocks,
                             .rank = rank_});
    }
    Write(item, total);
  }

  void Write(const Item& item, const float* states) const {
    kernels_.latent_output({.states = states,
                            .rows = RowsOf(item),
                            .rank = rank_,
                            .out = params_.out + item.token * params_.q_stride});
  }

  const CpuKvKernels& kernels_;
  ThreadPool& pool_;
  const LatentAttentionParams& params_;
  int rank_;
  int64_t state_floats_;
  std::vector<Item> items_;
  std::vector<Item> merges_;  // of decode
  int64_t num_states_ = 0;
  int max_rows_ = 0;
  float* states_ = nullptr;
};

}  // namespace

void CpuLatentAttention(const CpuKvKernels& kernels, ThreadPool& pool, CpuKvScratch& memory,
                        const LatentAttentionParams& params) {
  LatentCall(kernels, pool, params).Run(memory);
}

}  // namespace turbomind
