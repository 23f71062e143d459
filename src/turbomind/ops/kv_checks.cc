#include "turbomind/ops/kv_checks.h"

#include <algorithm>

#include "turbomind/core/check.h"
#include "turbomind/kv/block_seq_len.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind {

void CheckLayer(const KvLayerView& kv) {
  Check(kv.data != nullptr, "kv.data must be set");
  Check(kv.kv_heads > 0, "kv.kv_heads must be positive");
  Check(kv.head_dim > 0 && kv.head_dim % 16 == 0 && kv.head_dim <= kMaxHeadDim,
        "kv.head_dim must be a multiple of 16 and at most kMaxHeadDim");
  Check(kv.rotary_dim >= 0 && kv.rotary_dim % 16 == 0 && kv.rotary_dim <= kMaxRotaryDim,
        "kv.rotary_dim must be a multiple of 16 and at most 128");
  Check(block::IsBlockSeqLen(kv.block_seq_len),
        "kv.block_seq_len must be a power of two from 16 to 2^20");
  for (int side = 0; side < 2; ++side) {
    Check(kv.row_bytes[side] > 0, "kv.row_bytes must be positive");
    Check(kv.scale_bytes[side] == 0 || kv.scales != nullptr, "kv.scales must be set");
  }
}

void CheckBatch(const BatchView& batch) {
  Check(batch.num_seqs > 0 && batch.num_tokens > 0, "the batch must not be empty");
  Check(batch.num_decode >= 0 && batch.num_decode <= batch.num_seqs,
        "num_decode must be at most num_seqs");
  Check(batch.cu_seqlens[0] == 0 && batch.cu_seqlens[batch.num_seqs] == batch.num_tokens,
        "cu_seqlens must run from 0 to num_tokens");
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int first = batch.cu_seqlens[seq];
    const int new_tokens = batch.cu_seqlens[seq + 1] - first;
    Check(new_tokens > 0, "every sequence must have a new token");
    Check(seq >= batch.num_decode || new_tokens == 1,
          "decode sequences must have exactly one new token");
    Check(batch.context_lens[seq] >= new_tokens, "context_len must cover the new tokens");
    const int position = batch.context_lens[seq] - new_tokens;
    for (int i = 0; i < new_tokens; ++i) {
      Check(batch.positions[first + i] == position + i, "positions must match context_lens");
    }
  }
}

void CheckWindow16Layer(const KvLayerView& kv, const KvLayerView& window16) {
  if (window16.data == nullptr) {
    return;
  }
  CheckLayer(window16);
  Check(IsWindowFormat(window16.format[0]) && IsWindowFormat(window16.format[1]) &&
            (kv.HasLatents() || window16.format[1] == window16.format[0]),
        "the window must be in 16 bits or in int8");
  Check(kv.format[0] != KvCacheMode::kNone || window16.format[0] == KvCacheMode::kNone,
        "the window of 16-bit keys must be in 16 bits");
  Check(window16.kv_heads == kv.kv_heads && window16.head_dim == kv.head_dim &&
            window16.rotary_dim == kv.rotary_dim && window16.dtype == kv.dtype &&
            window16.block_seq_len == kv.block_seq_len,
        "the 16-bit pool must have the layer's shape");
}

void CheckBlocks(const BatchView& batch, const int32_t* tables, const PositionRange& range,
                 int block_seq_len) {
  if (range.begin >= range.end) {
    return;
  }
  Check(tables != nullptr, "the block tables must be set");
  const int32_t* blocks = tables + range.seq * batch.block_table_stride;
  Check((range.end + block_seq_len - 1) / block_seq_len <= batch.block_table_stride,
        "the block table must cover the context");
  for (int i = range.begin / block_seq_len; i * block_seq_len < range.end; ++i) {
    Check(blocks[i] >= 0, "every position that is read or written must have a block");
  }
}

void CheckRule(const KvLayerView& kv, const KvLayerView& window16, const PrecisionWindow& rule) {
  Check((window16.data != nullptr) == rule.enabled(),
        "there must be a 16-bit pool if and only if the rule is enabled");
  Check(!rule.enabled() || rule.block_seq_len == kv.block_seq_len,
        "the rule must have the layer's block_seq_len");
  Check(!rule.enabled() || rule.SinkEnd() % kTileTokens == 0,
        "the sinks must end at a tile boundary");
}

namespace {

// Checks the blocks that the queries [first, last] of a sequence read in the quantized view.
void CheckQuantizedBlocks(const CacheReads& reads, int seq, int first, int last) {
  PositionRange seen = {seq, last + 1, 0};
  for (int position = first; position <= last; ++position) {
    const int begin = std::max(FirstVisible(reads.window, position), reads.rule.SinkEnd());
    const int end = reads.rule.RecentBegin(position);
    if (begin < end) {
      seen = {seq, std::min(seen.begin, begin), std::max(seen.end, end)};
    }
  }
  CheckBlocks(reads.batch, reads.batch.block_tables, seen, reads.block_seq_len);
}

}  // namespace

void CheckReads(const CacheReads& reads, int seq) {
  const BatchView& batch = reads.batch;
  const int end = batch.context_lens[seq];
  const int first = batch.positions[batch.cu_seqlens[seq]];
  const int begin = FirstVisible(reads.window, first);
  if (!reads.rule.enabled()) {
    CheckBlocks(batch, batch.block_tables, {seq, begin, end}, reads.block_seq_len);
    return;
  }
  CheckQuantizedBlocks(reads, seq, first, end - 1);
  const int recent = std::max(begin, reads.rule.RecentBegin(first));
  CheckBlocks(batch, batch.window16_tables, {seq, begin, std::min(end, reads.rule.SinkEnd())},
              reads.block_seq_len);
  CheckBlocks(batch, batch.window16_tables, {seq, recent, end}, reads.block_seq_len);
}

}  // namespace turbomind
