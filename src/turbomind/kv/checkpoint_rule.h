#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace turbomind {

// Why a checkpoint is kept, from the least to the most useful.
enum class CheckpointKind : uint8_t {
  kNone,
  kInterval,  // it divides a long prompt
  kFork,      // a second prompt leaves the text of a first one here, maybe only to edit it
  kAnswer,    // the answer may end here, and the next turn then begins here
  kPrompt,    // the prompt ends here, rounded down so that the same prompt can hit it
  kBranch,    // more prompts that begin alike part here: the end of a shared system prompt
};

// Returns whether a checkpoint may be evicted first until a hit has used it.
constexpr bool IsSpareAtFirst(CheckpointKind kind) {
  return kind == CheckpointKind::kInterval || kind == CheckpointKind::kFork;
}

// Decides after which blocks of a sequence the state of its recurrent layers is kept.
struct CheckpointRule {
  int64_t block_seq_len = 1;
  int64_t interval = 0;                // blocks between those of kInterval; 0: none
  int64_t prompt_tokens = 0;           // at least 1
  int64_t fork = 0;                    // in blocks; 0: none
  std::vector<int64_t> branches = {};  // in blocks

  // The last token of a prompt is always computed, so a hit must end before it.
  int64_t PromptBlocks() const { return (prompt_tokens - 1) / block_seq_len; }
  // Returns the kind of the checkpoint after the first `num_blocks` blocks. REQUIRES: num_blocks is
  // positive.
  CheckpointKind After(int64_t num_blocks) const {
    if (std::ranges::find(branches, num_blocks) != branches.end()) {
      return CheckpointKind::kBranch;
    }
    if (num_blocks == PromptBlocks()) {
      return CheckpointKind::kPrompt;
    }
    if (num_blocks * block_seq_len >= prompt_tokens) {
      return CheckpointKind::kAnswer;
    }
    if (num_blocks == fork) {
      return CheckpointKind::kFork;
    }
    return interval > 0 && num_blocks % interval == 0 ? CheckpointKind::kInterval
                                                      : CheckpointKind::kNone;
  }
};

}  // namespace turbomind
