#include "turbomind/kv/pool_budget.h"

#include <algorithm>
#include <limits>
#include <string>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Holds products of three user-supplied numbers.
using Wide = __int128;

constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();  // ids are int32

int64_t Saturate(Wide value) {
  return static_cast<int64_t>(std::min<Wide>(value, std::numeric_limits<int64_t>::max()));
}

// Returns a * b / c, rounded down, without overflow.
int64_t MulDiv(int64_t a, int64_t b, int64_t c) { return Saturate(Wide{a} * b / c); }

void CheckDemand(const KvDemand& demand) {
  if (demand.session_len < 1 || demand.chunk < 1 || demand.max_sequences < 0 ||
      demand.num_running < 0) {
    throw InvalidArgument("The KV cache cannot be sized for session_len " +
                          std::to_string(demand.session_len) + ", max_prefill_token_num " +
                          std::to_string(demand.chunk) + " and max_batch_size " +
                          std::to_string(std::max(demand.max_sequences, demand.num_running)) +
                          ". Use positive numbers.");
  }
}

// Returns the quantized blocks of one sequence. A pool into which nothing is ever quantized still
// has one block.
int64_t QuantizedBlocks(const LayerGroup& group, const KvDemand& demand) {
  return std::max<int64_t>(group.BlocksPerSequence(demand.session_len, demand.chunk), 1);
}

// Returns the 16-bit blocks of `n` sequences. Each sequence has the blocks of a step that adds one
// block. All sequences share the tokens of one step, so only those tokens add blocks that do not
// fit into a block that is already counted.
int64_t Window16Blocks(const LayerGroup& group, int64_t n, const KvDemand& demand) {
  const int64_t alone = group.Window16BlocksPerSequence(demand.session_len, demand.chunk);
  const int64_t length = group.layout.config().block_seq_len;
  const int64_t each = group.Window16BlocksPerSequence(demand.session_len, length);
  const int64_t chunk = (demand.chunk - 1) / length;
  return Saturate(std::min(Wide{n} * alone, Wide{n} * each + chunk));
}

Wide SumBytes(const std::vector<int64_t>& blocks, const std::vector<int64_t>& block_bytes,
              size_t first_pool = 0) {
  Wide sum = 0;
  for (size_t pool = first_pool; pool < blocks.size(); ++pool) {
    sum += Wide{blocks[pool]} * block_bytes[pool];
  }
  return sum;
}

// Returns the largest number of sequences whose blocks fit into the budget.
int64_t SequencesThatFit(const std::vector<LayerGroup>& groups, int64_t budget,
                         const KvDemand& demand) {
  const std::vector<int64_t> bytes = BlockBytes(groups);
  int64_t fits = 0;
  int64_t too_many = kMaxBlocks;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    const Wide cost = SumBytes(BlocksForSequences(groups, middle, demand), bytes);
    (cost <= budget ? fits : too_many) = middle;
  }
  return fits;
}

// Returns the blocks for the budget. The remainder, too small for one more sequence, is split in
// the proportions of that sequence.
std::vector<int64_t> ShareBudget(const std::vector<LayerGroup>& groups, int64_t budget,
                                 const KvDemand& demand) {
  const std::vector<int64_t> bytes = BlockBytes(groups);
  const int64_t n = SequencesThatFit(groups, budget, demand);
  std::vector<int64_t> blocks = BlocksForSequences(groups, n, demand);
  const std::vector<int64_t> more = BlocksForSequences(groups, n + 1, demand);
  const Wide rest = budget - SumBytes(blocks, bytes);
  const Wide step = SumBytes(more, bytes) - SumBytes(blocks, bytes);
  for (size_t pool = 0; pool < blocks.size(); ++pool) {
    blocks[pool] = Saturate(blocks[pool] + rest * (more[pool] - blocks[pool]) / step);
  }
  return blocks;
}

// Grows the 16-bit pools for num_running sequences, up to a quarter of the budget, and shares the
// rest among the quantized pools. Returns `blocks` unchanged if a sequence of session_len would no
// longer fit.
std::vector<int64_t> WidenWindow16(const std::vector<LayerGroup>& groups, int64_t budget,
                                   const KvDemand& demand, std::vector<int64_t> blocks) {
  const std::vector<int64_t> bytes = BlockBytes(groups);
  const std::vector<int64_t> one = BlocksForSequences(groups, 1, demand);
  const std::vector<int64_t> wanted = BlocksForSequences(groups, demand.num_running, demand);
  const Wide wanted_bytes = SumBytes(wanted, bytes, groups.size());
  const Wide min_quantized_bytes = SumBytes(one, bytes) - SumBytes(one, bytes, groups.size());
  const Wide max_bytes = std::min<Wide>(budget / 4, budget - min_quantized_bytes);
  if (max_bytes <= 0) {
    return blocks;
  }
  std::vector<int64_t> wide = blocks;
  for (size_t pool = groups.size(); pool < blocks.size(); ++pool) {
    const Wide fits = wanted_bytes <= max_bytes ? Wide{wanted[pool]}
                                                : Wide{wanted[pool]} * max_bytes / wanted_bytes;
    wide[pool] = std::max(blocks[pool], Saturate(fits));
  }
  const Wide left = budget - SumBytes(wide, bytes, groups.size());
  for (size_t pool = 0; pool < groups.size(); ++pool) {
    wide[pool] = Saturate(std::max<Wide>(left, 0) * one[pool] / min_quantized_bytes);
    if (wide[pool] < one[pool]) {
      return blocks;
    }
  }
  return wide;
}

// Caps the blocks at those that max_sequences sequences need.
std::vector<int64_t> Limit(const std::vector<LayerGroup>& groups, std::vector<int64_t> blocks,
                           const KvDemand& demand) {
  const std::vector<int64_t> needed = BlocksForSequences(groups, demand.max_sequences, demand);
  for (size_t pool = 0; pool < blocks.size(); ++pool) {
    const int64_t max_blocks = demand.max_sequences > 0 ? needed[pool] : kMaxBlocks;
    blocks[pool] = std::clamp<int64_t>(blocks[pool], 0, std::min(max_blocks, kMaxBlocks));
  }
  return blocks;
}

// Returns the length, up to session_len, of the longest sequence that fits into `num_blocks`
// quantized blocks of a group.
int64_t LongestSequence(const LayerGroup& group, int64_t num_blocks, const KvDemand& demand) {
  int64_t fits = 0;
  int64_t too_long = demand.session_len;
  if (group.BlocksPerSequence(too_long, demand.chunk) <= num_blocks) {
    return too_long;
  }
  while (too_long - fits > 1) {
    const int64_t middle = fits + (too_long - fits) / 2;
    (group.BlocksPerSequence(middle, demand.chunk) <= num_blocks ? fits : too_long) = middle;
  }
  return fits;
}

}  // namespace

std::vector<int64_t> BlockBytes(const std::vector<LayerGroup>& groups) {
  std::vector<int64_t> bytes;
  for (const LayerGroup& group : groups) {
    bytes.push_back(group.bytes_per_block());
  }
  for (size_t g = 0; HasWindow16(groups) && g < groups.size(); ++g) {
    bytes.push_back(groups[g].window16_bytes_per_block());
  }
  return bytes;
}

std::vector<int64_t> BlocksForSequences(const std::vector<LayerGroup>& groups,
                                        int64_t num_sequences, const KvDemand& demand) {
  CheckDemand(demand);
  std::vector<int64_t> blocks;
  for (const LayerGroup& group : groups) {
    blocks.push_back(MulDiv(num_sequences, QuantizedBlocks(group, demand), 1));
  }
  for (size_t g = 0; HasWindow16(groups) && g < groups.size(); ++g) {
    blocks.push_back(Window16Blocks(groups[g], num_sequences, demand));
  }
  return blocks;
}

std::vector<int64_t> BlocksForBudget(const std::vector<LayerGroup>& groups, int64_t budget_bytes,
                                     const KvDemand& demand) {
  CheckDemand(demand);
  const int64_t budget = std::max<int64_t>(budget_bytes, 0);
  std::vector<int64_t> blocks = ShareBudget(groups, budget, demand);
  if (HasWindow16(groups) && demand.num_running > 0) {
    blocks = WidenWindow16(groups, budget, demand, std::move(blocks));
  }
  return Limit(groups, std::move(blocks), demand);
}

std::vector<int64_t> BlocksForCount(const std::vector<LayerGroup>& groups, int64_t num_blocks,
                                    const KvDemand& demand) {
  CheckDemand(demand);
  const int64_t count = std::max<int64_t>(num_blocks, 0);
  const int64_t first = QuantizedBlocks(groups.front(), demand);
  std::vector<int64_t> blocks;
  for (const LayerGroup& group : groups) {
    blocks.push_back(MulDiv(count, QuantizedBlocks(group, demand), first));
  }
  if (!HasWindow16(groups)) {
    return Limit(groups, std::move(blocks), demand);
  }
  KvDemand longest = demand;
  longest.session_len = std::max<int64_t>(LongestSequence(groups.front(), count, demand), 1);
  for (size_t g = 0; g < groups.size(); ++g) {
    blocks[g] = std::max<int64_t>(blocks[g], count > 0 ? 1 : 0);
    const int64_t window16 = std::max(
        {Window16Blocks(groups[g], 1, longest), Window16Blocks(groups[g], count / first, demand),
         std::min(Window16Blocks(groups[g], demand.num_running, demand), count)});
    blocks.push_back(window16);
  }
  return Limit(groups, std::move(blocks), demand);
}

bool HoldSequence(const std::vector<LayerGroup>& groups, const std::vector<int64_t>& blocks,
                  int64_t num_tokens, int64_t chunk) {
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].BlocksPerSequence(num_tokens, chunk) > blocks[g] ||
        (HasWindow16(groups) &&
         groups[g].Window16BlocksPerSequence(num_tokens, chunk) > blocks[groups.size() + g])) {
      return false;
    }
  }
  return true;
}

}  // namespace turbomind
