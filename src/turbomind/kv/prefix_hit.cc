#include "turbomind/kv/prefix_hit.h"

#include <algorithm>
#include <functional>

namespace turbomind {
namespace {

// Answers whether all blocks of a range are present.
class Presence {
 public:
  Presence(int64_t num_blocks, const std::function<bool(size_t)>& is_present) {
    int64_t run = 0;
    for (int64_t i = 0; i < num_blocks; ++i) {
      run = is_present(static_cast<size_t>(i)) ? run + 1 : 0;
      runs_.push_back(run);
    }
  }

  bool Has(int64_t begin, int64_t end) const {
    return begin >= end || runs_[static_cast<size_t>(end - 1)] >= end - begin;
  }

 private:
  std::vector<int64_t> runs_;  // by block: length of the run of present blocks that ends there
};

struct GroupPresence {
  const LayerGroup& group;
  Presence quantized;
  Presence window16;
  Presence either;

  bool IsFound(int64_t n) const { return either.Has(First(n), n); }
  bool IsUsable(int64_t n) const {
    const PrecisionWindow& rule = group.rule;
    const int64_t first = First(n);
    if (!rule.enabled()) {
      return quantized.Has(first, n);
    }
    const int64_t sinks_end = std::min<int64_t>(rule.sink_blocks, n);
    const int64_t quantized_begin = std::max(first, sinks_end);
    const int64_t recent = std::max(quantized_begin, n - rule.recent_blocks);
    const int64_t leaving = std::max(quantized_begin, recent - 1);
    return window16.Has(first, sinks_end) && quantized.Has(quantized_begin, leaving) &&
           either.Has(leaving, recent) && window16.Has(recent, n);
  }

 private:
  int64_t First(int64_t n) const {
    return group.FirstVisibleBlock(n * group.layout.config().block_seq_len);
  }
};

}  // namespace

PrefixHit FindPrefixHit(const std::vector<LayerGroup>& groups,
                        const std::vector<std::vector<int>>& path, int checkpoint_pool) {
  const auto num_blocks = static_cast<int64_t>(path.size());
  std::vector<GroupPresence> present;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto has_quantized = [&](size_t i) { return path[i][g] >= 0; };
    const auto has_window16 = [&](size_t i) {
      return groups[g].rule.enabled() && path[i][groups.size() + g] >= 0;
    };
    const auto has_either = [&](size_t i) { return has_quantized(i) || has_window16(i); };
    present.push_back({groups[g], Presence(num_blocks, has_quantized),
                       Presence(num_blocks, has_window16), Presence(num_blocks, has_either)});
  }
  PrefixHit hit;
  for (int64_t n = num_blocks; n > 0 && hit.num_blocks == 0; --n) {
    const auto all = [&](auto of_group) { return std::ranges::all_of(present, of_group); };
    if (hit.num_found == 0 && all([n](const GroupPresence& g) { return g.IsFound(n); })) {
      hit.num_found = n;
    }
    const bool has_state =
        checkpoint_pool < 0 ||
        path[static_cast<size_t>(n - 1)][static_cast<size_t>(checkpoint_pool)] >= 0;
    if (has_state && all([n](const GroupPresence& g) { return g.IsUsable(n); })) {
      hit.num_blocks = n;
    }
  }
  return hit;
}

}  // namespace turbomind
