#include "turbomind/kv/precision_window.h"

#include <string>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int kGranularity = 64;
constexpr int kLimit = 4096;

void RequireTokens(const char* field, const char* flag, int got) {
  if (got < 0 || got > kLimit || got % kGranularity != 0) {
    throw InvalidArgument(field, "is " + std::to_string(got) +
                                     " but must be a multiple of 64 from 0 to 4096 (" + flag + ")");
  }
}

}  // namespace

PrecisionWindow MakePrecisionWindow(const PrecisionWindowTokens& tokens, int block_seq_len) {
  PrecisionWindow rule;
  rule.block_seq_len = block_seq_len;
  if (tokens.recent_tokens == -1 && tokens.sink_tokens == 0) {
    return rule;
  }
  RequireTokens("kv_sink_tokens", "--kv-sink-tokens", tokens.sink_tokens);
  RequireTokens("kv_recent_tokens", "--kv-recent-tokens", tokens.recent_tokens);
  rule.sink_blocks = static_cast<int>(CeilDiv(tokens.sink_tokens, block_seq_len));
  rule.recent_blocks = static_cast<int>(CeilDiv(tokens.recent_tokens, block_seq_len));
  return rule;
}

}  // namespace turbomind
