#pragma once

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind {

// Which blocks a query sees in 16 bit (the 16-bit window) and which as stored by the layer's format
// (quantized): by positions alone, the same in prefill and decode, so that prefix hits, chunks and
// preemption change nothing (docs/kv_cache.md, "16-bit blocks").
//
// A query at position p, in block j = p / block_seq_len, sees in 16 bits: the first `sink_blocks`
// blocks, and blocks j - recent_blocks .. j. All others are quantized. Plain data, read by kernels.
//
// Positions: 16-bit are [0, SinkEnd()) and [RecentBegin(p), p]; quantized is [SinkEnd(),
// RecentBegin(p)). SinkEnd() is a multiple of 64 tokens, the tile of attention; RecentBegin of
// block_seq_len alone.
struct PrecisionWindow {
  int block_seq_len = 0;
  int sink_blocks = 0;
  int recent_blocks = -1;  // before the current one; -1: there is no 16-bit window

  TM_HD bool enabled() const { return recent_blocks >= 0; }
  TM_HD int SinkEnd() const { return sink_blocks * block_seq_len; }
  // At least SinkEnd().
  TM_HD int RecentBegin(int position) const {
    const int begin = (position / block_seq_len - recent_blocks) * block_seq_len;
    return begin > SinkEnd() ? begin : SinkEnd();
  }
  // Whether the blocks that a query in a layer with this window (0: full attention) sees are all
  // 16-bit, whatever its position: the first that could see a block quantized comes recent_blocks
  // blocks after the block's end.
  TM_HD bool IsAlwaysInWindow16(int window) const {
    return enabled() && window > 0 && window <= recent_blocks * block_seq_len + 1;
  }
  // Whether a query at `position` sees `block` in 16 bits. REQUIRES: block <= position /
  // block_seq_len.
  TM_HD bool IsInWindow16(int64_t block, int64_t position) const {
    return block < sink_blocks || block + recent_blocks >= position / block_seq_len;
  }
};

// A block that leaves the recent window: its slot in the 16-bit pool and in the quantized one.
struct PendingQuantization {
  int32_t window16 = -1;
  int32_t quantized = -1;
};

// What is in the 16-bit window, in tokens: multiples of 64, rounded up to whole blocks. The current
// block is in the 16-bit window whenever anything is. `recent_tokens` -1 turns 16-bit blocks off.
struct PrecisionWindowTokens {
  int sink_tokens = 0;
  int recent_tokens = -1;
};

// Throws InvalidArgument for numbers that are not multiples of 64 in [0, 4096] (-1 allowed for
// recent_tokens, with sink_tokens 0).
PrecisionWindow MakePrecisionWindow(const PrecisionWindowTokens& tokens, int block_seq_len);

}  // namespace turbomind
