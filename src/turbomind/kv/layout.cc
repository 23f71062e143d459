#include "turbomind/kv/layout.h"

#include <string>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/block_seq_len.h"
#include "turbomind/kv/codec.h"

namespace turbomind {

KvLayerView KvLayerView::Heads(int first, int count) const {
  Check(0 <= first && 0 < count && count <= kv_heads - first,
        "the head range must lie within the layer's heads");
  KvLayerView heads = *this;
  heads.data = Payload(KvSide::kK, 0, first);
  heads.param_offset = Params(KvSide::kK, 0, first) - heads.data;
  if (HasKOffset()) {
    const KvRow row = KOffset(0, first);
    heads.k_offset_codes = reinterpret_cast<std::byte*>(row.payload) - heads.data;
    heads.k_offset_params = reinterpret_cast<std::byte*>(row.metadata) - heads.data;
  }
  if (scales != nullptr) {
    heads.scales = Scales(KvSide::kK, 0, first);
  }
  for (const float*& head_scales : heads.global_scale) {
    head_scales = head_scales != nullptr ? head_scales + first : nullptr;
  }
  heads.kv_heads = count;
  return heads;
}

}  // namespace turbomind

namespace turbomind::block {
namespace {

constexpr int64_t kAlignment = 16;
constexpr int64_t kOffsetAlignment = 64;  // rows of the next layer begin at a cache line

void CheckFormat(KvCacheMode format, int head_dim) {
  const int group = DispatchFormat(format, []<KvCacheMode M>() {
    static_assert(InfoOf(M).bits == Codec<M>::kBits && InfoOf(M).group == Codec<M>::kGroup,
                  "every format has a row in kKvFormats that agrees with its codec");
    return Codec<M>::kGroup;
  });
  const int multiple = group ? group : 2;
  if (head_dim % multiple != 0) {
    throw InvalidArgument("head_dim", std::to_string(head_dim) +
                                          " is not supported. It must be a multiple of " +
                                          std::to_string(multiple) + " for quant_policy " +
                                          ToString(format) + ". Use another quant_policy.");
  }
}

void CheckConfig(const Config& config) {
  const int length = config.block_seq_len;
  if (!IsBlockSeqLen(length)) {
    throw InvalidArgument(
        "cache_block_seq_len",
        "is " + std::to_string(length) + ". It must be a power of two from 16 to 1048576.");
  }
  if (config.head_dim < 1 || config.head_dim > 4096) {
    throw InvalidArgument("head_dim",
                          "is " + std::to_string(config.head_dim) + ". It must be 1 to 4096.");
  }
  if (config.kv_heads < 1 || config.kv_heads > 65536) {
    throw InvalidArgument("The number of KV heads is " + std::to_string(config.kv_heads) +
                          ". It must be 1 to 65536.");
  }
  Check(config.rotary_dim == 0 ||
            (config.rotary_dim > 0 && config.rotary_dim % 16 == 0 && config.kv_heads == 1),
        "latents must have one KV head and a rotary part of whole runs of 16");
  if (config.layers.empty()) {
    throw InvalidArgument("A block needs at least 1 layer, but the configuration has none.");
  }
  for (const Config::LayerFormats& formats : config.layers) {
    CheckFormat(formats.v, config.head_dim);
    if (config.rotary_dim > 0) {
      CheckFormat(formats.k, config.rotary_dim);
      RequireLatentPair(formats.k, formats.v);
    } else {
      CheckFormat(formats.k, config.head_dim);
      RequireListedPair(formats.k, formats.v);
    }
  }
}

int64_t AlignUp(int64_t bytes, int64_t alignment) { return CeilDiv(bytes, alignment) * alignment; }

int64_t EndOfParams(const KvLayerView& view) {
  return view.param_offset + static_cast<int64_t>(view.kv_heads) * view.block_seq_len *
                                 (view.param_bytes[0] + view.param_bytes[1]);
}

// Returns the sizes of one layer. Offsets and pointers stay unset.
KvLayerView Shape(const Config& config, const Config::LayerFormats& formats) {
  KvLayerView view;
  view.dtype = config.dtype;
  view.block_seq_len = config.block_seq_len;
  view.kv_heads = config.kv_heads;
  view.head_dim = config.head_dim;
  view.rotary_dim = config.rotary_dim;
  view.format[0] = formats.k;
  view.format[1] = formats.v;
  for (int side = 0; side < 2; ++side) {
    const int dim = view.Dim(static_cast<KvSide>(side));
    view.row_bytes[side] = RowBytes(view.format[side], dim, config.dtype);
    view.param_bytes[side] = ParamBytes(view.format[side], config.dtype);
    view.scale_bytes[side] = ScaleBytes(view.format[side], dim);
  }
  const int64_t slots = static_cast<int64_t>(config.kv_heads) * config.block_seq_len;
  view.param_offset = slots * (view.row_bytes[0] + view.row_bytes[1]);
  if (config.k_offset && view.format[static_cast<int>(view.OffsetSide())] != KvCacheMode::kNone) {
    view.k_offset_codes = AlignUp(EndOfParams(view), kOffsetAlignment);
    view.k_offset_params = view.k_offset_codes + int64_t{config.kv_heads} * config.head_dim;
  }
  return view;
}

int64_t LayerBytes(const KvLayerView& view) {
  if (!view.HasKOffset()) {
    return EndOfParams(view);
  }
  const int64_t params = int64_t{view.kv_heads} * ParamBytes(KvCacheMode::kInt8, view.dtype);
  return AlignUp(view.k_offset_params + params, kOffsetAlignment);
}

int64_t LayerScaleBytes(const KvLayerView& view) {
  return static_cast<int64_t>(view.kv_heads) * view.block_seq_len * view.ScaleStride();
}

}  // namespace

int RowBytes(KvCacheMode format, int head_dim, DataType dtype) {
  if (format == KvCacheMode::kNone) {
    return head_dim * SizeOf(dtype);
  }
  return DispatchFormat(format, [&]<KvCacheMode M>() { return head_dim * Codec<M>::kBits / 8; });
}

int ParamBytes(KvCacheMode format, DataType dtype) {
  return DispatchFormat(
      format, [&]<KvCacheMode M>() { return Codec<M>::kHasParams ? 2 * SizeOf(dtype) : 0; });
}

int ScaleBytes(KvCacheMode format, int head_dim) {
  return DispatchFormat(format, [&]<KvCacheMode M>() {
    if constexpr (Codec<M>::kHasScales) {
      return head_dim / Codec<M>::kGroup;
    } else {
      return 0;
    }
  });
}

Layout::Layout(Config config) : config_(std::move(config)) {
  CheckConfig(config_);
  for (const Config::LayerFormats& formats : config_.layers) {
    const KvLayerView view = Shape(config_, formats);
    layer_offset_.push_back(block_bytes_);
    scale_layer_offset_.push_back(scale_block_bytes_);
    block_bytes_ += LayerBytes(view);
    scale_block_bytes_ += LayerScaleBytes(view);
    Check(block_bytes_ % kAlignment == 0 && scale_block_bytes_ % kAlignment == 0,
          "the size of each layer of a block must be a multiple of 16 bytes");
  }
}

double Layout::bytes_per_token() const {
  return static_cast<double>(block_bytes_ + scale_block_bytes_) / config_.block_seq_len;
}

KvLayerView Layout::LayerView(int layer, std::byte* data_pool, std::byte* scale_pool) const {
  const auto index = static_cast<size_t>(layer);
  Check(layer >= 0 && index < config_.layers.size(), "the layer must be in the group");
  KvLayerView view = Shape(config_, config_.layers[index]);
  view.data = data_pool ? data_pool + layer_offset_[index] : nullptr;
  view.scales =
      scale_pool && view.ScaleStride() ? scale_pool + scale_layer_offset_[index] : nullptr;
  view.block_bytes = block_bytes_;
  view.scale_block_bytes = scale_block_bytes_;
  return view;
}

}  // namespace turbomind::block
