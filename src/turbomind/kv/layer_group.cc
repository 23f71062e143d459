#include "turbomind/kv/layer_group.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind {
namespace {

// Returns ⌈(a + b) / c⌉ without overflow.
int64_t CeilDivSum(int64_t a, int64_t b, int64_t c) {
  return static_cast<int64_t>((static_cast<__int128>(a) + b + c - 1) / c);
}

}  // namespace

KvCacheConfig MakeKvCacheConfig(const std::vector<int>& windows, KvCacheMode format, int kv_heads,
                                int head_dim, int block_seq_len, DataType dtype) {
  KvCacheConfig config;
  config.layers.assign(windows.size(), {format, format});
  config.windows = windows;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.block_seq_len = block_seq_len;
  config.dtype = dtype;
  return config;
}

int64_t LayerGroup::BlocksPerSequence(int64_t num_tokens, int64_t chunk) const {
  const int64_t length = layout.config().block_seq_len;
  const int64_t all = CeilDiv(num_tokens, length);
  const int64_t added = std::min(chunk, num_tokens);
  if (!rule.enabled()) {
    const int64_t reach = CeilDiv(WindowReach(window), length);
    return window == 0 ? all : std::min(all, reach + 2 + CeilDiv(added, length));
  }
  const int64_t quantized = std::max<int64_t>(all - 1 - rule.recent_blocks - rule.sink_blocks, 0);
  if (window == 0) {
    return quantized;
  }
  if (rule.IsAlwaysInWindow16(window)) {
    return 0;
  }
  // Counts from the first block that the step's first query sees to the last block that its last
  // query reads as quantized. It takes the worst case over all positions at which the step can
  // begin.
  return std::min(quantized,
                  CeilDivSum(added, WindowReach(window) - 2, length) - rule.recent_blocks);
}

int64_t LayerGroup::Window16BlocksPerSequence(int64_t num_tokens, int64_t chunk) const {
  if (!rule.enabled()) {
    return 0;
  }
  const int64_t length = layout.config().block_seq_len;
  const int64_t added = std::min(chunk, num_tokens);
  const int64_t kept = rule.sink_blocks + rule.recent_blocks + 1 + CeilDiv(added, length);
  int64_t max_blocks = std::min(CeilDiv(num_tokens, length), kept);
  if (window != 0) {
    max_blocks = std::min(max_blocks, CeilDivSum(added, WindowReach(window) - 2, length) + 1);
  }
  return max_blocks;
}

int64_t LayerGroup::QuantizedBlocksHeld(int64_t num_tokens) const {
  const int64_t all = CeilDiv(num_tokens, layout.config().block_seq_len);
  return all - FirstVisibleBlock(num_tokens) - Window16BlocksHeld(num_tokens);
}

int64_t LayerGroup::Window16BlocksHeld(int64_t num_tokens) const {
  if (!rule.enabled() || num_tokens < 1) {
    return 0;
  }
  const int64_t length = layout.config().block_seq_len;
  const int64_t all = CeilDiv(num_tokens, length);
  const int64_t first = FirstVisibleBlock(num_tokens);
  const int64_t sinks_end = std::min<int64_t>(rule.sink_blocks, all);
  const int64_t recent_begin = std::max({sinks_end, first, all - 1 - rule.recent_blocks});
  return std::max<int64_t>(sinks_end - first, 0) + all - recent_begin;
}

int64_t LayerGroup::FirstVisibleBlock(int64_t position) const {
  return FirstVisible(window, position) / layout.config().block_seq_len;
}

BlockRange LayerGroup::QuantizedBlocks(int64_t begin, int64_t end) const {
  Check(rule.enabled(), "the 16-bit window must be on");
  const int64_t length = rule.block_seq_len;
  if (end <= begin || rule.IsAlwaysInWindow16(window)) {
    return {};
  }
  return {std::max<int64_t>(rule.sink_blocks, FirstVisibleBlock(begin)),
          (end - 1) / length - rule.recent_blocks};
}

std::vector<LayerGroup> MakeLayerGroups(const KvCacheConfig& config) {
  Check(config.layers.size() == config.windows.size(), "each layer must have a window");
  const PrecisionWindow rule = MakePrecisionWindow(config.window16, config.block_seq_len);
  // A 16-bit copy of a 16-bit layer would only take memory.
  const auto has_no_window16 = [&](size_t layer) {
    const block::Config::LayerFormats& formats = config.layers[layer];
    return rule.enabled() && formats.k == KvCacheMode::kNone && formats.v == KvCacheMode::kNone;
  };
  const auto of_layer = [](const std::vector<int>& sizes, size_t layer, int size) {
    return sizes.empty() ? size : sizes[layer];
  };
  std::map<std::tuple<bool, int, bool, int, int>, std::vector<int>> by_window;
  std::vector<int> num_readers(config.layers.size());
  for (size_t layer = 0; layer < config.windows.size(); ++layer) {
    const int window = config.windows[layer];
    if (window == kNoAttention) {
      continue;
    }
    const int source = of_layer(config.kv_sources, layer, static_cast<int>(layer));
    ++num_readers[static_cast<size_t>(source)];
    if (source != static_cast<int>(layer)) {
      continue;
    }
    const bool is_chunk = window < 0;
    const int head_dim = of_layer(config.layer_head_dims, layer, config.head_dim);
    const int kv_heads = of_layer(config.layer_kv_heads, layer, config.kv_heads);
    by_window[{is_chunk, window, has_no_window16(layer), head_dim, kv_heads}].push_back(
        static_cast<int>(layer));
  }
  if (by_window.empty()) {
    throw InvalidArgument(
        "The KV cache needs at least 1 layer with attention, but the model has none.");
  }
  std::vector<LayerGroup> groups;
  for (auto& [key, layers] : by_window) {
    const auto& [is_chunk, window, is_sixteen_bit, head_dim, kv_heads] = key;
    block::Config block;
    int readers = 0;
    for (const int layer : layers) {
      readers += num_readers[static_cast<size_t>(layer)];
      block.layers.push_back(config.layers[static_cast<size_t>(layer)]);
    }
    block.kv_heads = kv_heads;
    block.head_dim = head_dim;
    block.rotary_dim = config.rotary_dim;
    block.block_seq_len = config.block_seq_len;
    block.dtype = config.dtype;
    block.k_offset = config.k_offset && (rule.enabled() || config.k_bias);
    LayerGroup& group =
        groups.emplace_back(LayerGroup{window, std::move(layers), readers, block::Layout(block),
                                       std::nullopt, is_sixteen_bit ? PrecisionWindow{} : rule});
    if (group.rule.enabled()) {
      for (block::Config::LayerFormats& formats : block.layers) {
        formats.k = formats.k == KvCacheMode::kNone ? KvCacheMode::kNone : config.window_format;
        formats.v = config.rotary_dim == 0            ? formats.k
                    : formats.v == KvCacheMode::kNone ? KvCacheMode::kNone
                                                      : config.window_format;
      }
      block.k_offset = config.k_offset && config.k_bias;
      group.window16_layout.emplace(std::move(block));
    }
  }
  return groups;
}

bool HasWindow16(const std::vector<LayerGroup>& groups) {
  return std::ranges::any_of(groups, [](const LayerGroup& group) { return group.rule.enabled(); });
}

}  // namespace turbomind
