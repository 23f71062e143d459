#pragma once

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind {

// Which blocks a query sees in 16 bit ("hot") and which as stored by the layer's format ("cold"):
// by positions alone, the same in prefill and decode, so that prefix hits, chunks and preemption
// change nothing (docs/kv_cache.md, "Hot blocks").
//
// A query at position p, in block j = p / block_seq_len, sees hot: the first `sink_blocks` blocks,
// and blocks j - recent_blocks .. j. All others are cold. Plain data, read by kernels.
//
// Positions: hot are [0, SinkEnd()) and [RecentBegin(p), p]; cold is [SinkEnd(), RecentBegin(p)).
// SinkEnd() is a multiple of 64 tokens, the tile of attention; RecentBegin of block_seq_len alone.
struct HotRule {
  int block_seq_len = 0;
  int sink_blocks = 0;
  int recent_blocks = -1;  // before the current one; -1: nothing is hot

  TM_HD bool enabled() const { return recent_blocks >= 0; }
  TM_HD int SinkEnd() const { return sink_blocks * block_seq_len; }
  // At least SinkEnd().
  TM_HD int RecentBegin(int position) const {
    const int begin = (position / block_seq_len - recent_blocks) * block_seq_len;
    return begin > SinkEnd() ? begin : SinkEnd();
  }
  // Whether the blocks that a query in a layer with this window (0: full attention) sees are all
  // hot, whatever its position: the first that could see a block cold comes recent_blocks blocks
  // after the block's end.
  TM_HD bool IsAlwaysHot(int window) const {
    return enabled() && window > 0 && window <= recent_blocks * block_seq_len + 1;
  }
  // Whether a query at `position` sees `block` hot. REQUIRES: block <= position / block_seq_len.
  TM_HD bool IsHot(int64_t block, int64_t position) const {
    return block < sink_blocks || block + recent_blocks >= position / block_seq_len;
  }
};

// A block that leaves the recent window: its slot in the hot pool and in the cold one.
struct BlockMove {
  int32_t hot = -1;
  int32_t cold = -1;
};

// What is hot, in tokens: multiples of 64, rounded up to whole blocks. The current block is hot
// whenever anything is. `recent_tokens` -1 turns hot blocks off.
struct HotTokens {
  int sink_tokens = 0;
  int recent_tokens = -1;
};

// Throws InvalidArgument for numbers that are not multiples of 64 in [0, 4096] (-1 allowed for
// recent_tokens, with sink_tokens 0).
HotRule MakeHotRule(const HotTokens& tokens, int block_seq_len);

}  // namespace turbomind
