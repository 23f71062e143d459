#pragma once

#include <cstdint>

#include "turbomind/core/host_device.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind {

// Decides which blocks a query reads from the 16-bit window and which in the layer's KV format
// (docs/kv_cache.md, "The 16-bit window"). The rule depends on positions alone and is the same in
// prefill and decode. Prefix hits, chunking and preemption therefore do not change the result.
//
// A query at position p, in block j = p / block_seq_len, reads in 16 bits the first `sink_blocks`
// blocks and blocks j - recent_blocks .. j. It reads all other blocks in the KV format. The struct
// is plain data that kernels read.
//
// The query reads positions [0, SinkEnd()) and [RecentBegin(p), p] in 16 bits, and positions
// [SinkEnd(), RecentBegin(p)) in the KV format. SinkEnd() is a multiple of 64 tokens, the attention
// tile. RecentBegin() is only a multiple of block_seq_len, unless it equals SinkEnd().
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
  // Returns whether queries of a layer with this window (0: full attention) read every visible
  // block in 16 bits, at every position. The first query that could read a block as quantized comes
  // recent_blocks blocks after the end of the block.
  TM_HD bool IsAlwaysInWindow16(int window) const {
    return enabled() && window != 0 && WindowReach(window) <= recent_blocks * block_seq_len + 1;
  }
  // Returns whether a query at `position` reads `block` in 16 bits. REQUIRES: block <= position /
  // block_seq_len.
  TM_HD bool IsInWindow16(int64_t block, int64_t position) const {
    return block < sink_blocks || block + recent_blocks >= position / block_seq_len;
  }
};

// The slots of a block that leaves the recent window: in the 16-bit pool and in the quantized pool.
struct PendingQuantization {
  int32_t window16 = -1;
  int32_t quantized = -1;
};

// Size of the 16-bit window in tokens: multiples of 64, rounded up to whole blocks. If the window
// is on, the current block is always 16-bit. `recent_tokens` -1 turns the window off.
struct PrecisionWindowTokens {
  int sink_tokens = 0;
  int recent_tokens = -1;
};

// Throws InvalidArgument for numbers that are not multiples of 64 in [0, 4096]. Also allows
// recent_tokens -1 with sink_tokens 0.
PrecisionWindow MakePrecisionWindow(const PrecisionWindowTokens& tokens, int block_seq_len);

}  // namespace turbomind
