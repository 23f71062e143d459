#include "kvx/src/quantized.h"

#include <cmath>

#include "kvx/src/jobs.h"
#include "kvx/src/rows.h"
#include "kvx/src/tables.h"
#include "kvx/src/validate.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"

namespace kvx {
namespace {

using turbomind::KvCacheMode;
using turbomind::KvLayerView;
using turbomind::KvSide;
using turbomind::RowFormat;

constexpr int kMaxHeadDim = 4096;  // of block::Layout
constexpr int kAlignment = 16;

// A mode is the number of a format in the engine. test_abi.py compares the header with the engine's
// table of formats.
KvCacheMode FormatOf(const kvx_tm_mode_t& mode) {
  for (const KvCacheMode format : turbomind::kAllKvCacheModes) {
    if (Raw(mode) == static_cast<int>(format)) {
      return format;
    }
  }
  throw Refusal{KVX_STATUS_INVALID_ARGUMENT};
}

bool HasOffsets(const kvx_tm_layer_t& layer) { return (layer.flags & KVX_TM_FLAG_K_OFFSET) != 0; }

// Throws Refusal and InvalidArgument.
turbomind::block::Layout LayoutOf(const kvx_tm_layer_t* layer) {
  Require(layer != nullptr && layer->size >= sizeof(*layer));
  Require(IsFloat(Raw(layer->dtype)));
  constexpr uint32_t kFlags = KVX_TM_FLAG_ROTATED | KVX_TM_FLAG_SEARCH | KVX_TM_FLAG_K_OFFSET;
  Require((layer->flags & ~kFlags) == 0);
  Require(layer->num_kv_heads <= INT32_MAX && layer->head_dim <= INT32_MAX &&
          layer->block_size <= INT32_MAX);
  return turbomind::block::Layout({.layers = {{FormatOf(layer->k_mode), FormatOf(layer->v_mode)}},
                                   .kv_heads = static_cast<int>(layer->num_kv_heads),
                                   .head_dim = static_cast<int>(layer->head_dim),
                                   .block_seq_len = static_cast<int>(layer->block_size),
                                   .dtype = FloatType(Raw(layer->dtype)),
                                   .k_offset = HasOffsets(*layer)});
}

bool IsWholeBlock(uint64_t bytes, int64_t needed, uint64_t num_blocks) {
  return bytes >= static_cast<uint64_t>(needed) && bytes % kAlignment == 0 &&
         bytes <= static_cast<uint64_t>(INT64_MAX) / num_blocks;
}

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

void CheckFactors(const float* factors, uint32_t heads) {
  for (uint32_t head = 0; factors != nullptr && head < heads; ++head) {
    Require(std::isfinite(factors[head]) && factors[head] > 0.f);
  }
}

// Returns the view of a layer and checks its memory.
KvLayerView ViewOf(const kvx_tm_layer_t* layer) {
  const turbomind::block::Layout layout = LayoutOf(layer);
  Require(layer->num_blocks > 0 && layer->data != nullptr);
  Require(IsWholeBlock(layer->block_bytes, layout.block_bytes(), layer->num_blocks));
  if (layout.scale_block_bytes() > 0) {
    Require(layer->scales != nullptr &&
            IsWholeBlock(layer->scale_block_bytes, layout.scale_block_bytes(), layer->num_blocks));
  }
  CheckMemoryType(layer->memory);
  Require(IsAligned(layer->data) && IsAligned(layer->scales), KVX_STATUS_UNSUPPORTED);
  const bool is_rotated = (layer->flags & KVX_TM_FLAG_ROTATED) != 0;
  Require(!is_rotated || layer->head_dim % 16 == 0, KVX_STATUS_UNSUPPORTED);
  KvLayerView view = layout.LayerView(0, static_cast<std::byte*>(layer->data),
                                      static_cast<std::byte*>(layer->scales));
  view.block_bytes = static_cast<int64_t>(layer->block_bytes);
  view.scale_block_bytes = static_cast<int64_t>(layer->scale_block_bytes);
  view.global_scale[0] = layer->k_factors;
  view.global_scale[1] = layer->v_factors;
  return view;
}

Counts CountsOf(const kvx_tm_layer_t& layer) {
  return {layer.num_blocks, layer.block_size, layer.num_kv_heads, layer.head_dim};
}

// One side of a layer: how a row of a head is changed and stored.
class Side {
 public:
  Side(const kvx_tm_layer_t& layer, const KvLayerView& view, KvSide side)
      : is_rotated_(side == KvSide::kK && (layer.flags & KVX_TM_FLAG_ROTATED) != 0),
        mean_(side == KvSide::kK ? layer.k_mean : nullptr) {
    const int s = static_cast<int>(side);
    format_.format = view.format[s];
    format_.n = view.head_dim;
    format_.dtype = view.dtype;
    format_.search = (layer.flags & KVX_TM_FLAG_SEARCH) != 0;
    factors_ = turbomind::HasGlobalScale(format_.format) ? view.global_scale[s] : nullptr;
    CheckFactors(factors_, layer.num_kv_heads);
  }

  // Moves the row of a head between an IO tensor and a token of a block.
  void Write(const std::byte* io, int dtype, const turbomind::KvRow& to, int head) const {
    float buffer[kMaxHeadDim];
    const float* row = buffer;
    if (IsStoredAsGiven(dtype)) {
      row = reinterpret_cast<const float*>(io);
    } else {
      LoadRow(io, dtype, format_.n, buffer);
      Change(buffer, head);
    }
    RowKernels().encode_row(FormatOf(head), row, to.payload, to.metadata);
  }
  // `offset` is the K offset of the block, or null.
  void Read(const turbomind::KvRow& from, int head, const float* offset, int dtype,
            std::byte* io) const {
    float buffer[kMaxHeadDim];
    const bool is_direct = IsStoredAsGiven(dtype);
    float* row = is_direct ? reinterpret_cast<float*>(io) : buffer;
    RowKernels().decode_row(FormatOf(head), from.payload, from.metadata, row);
    for (int d = 0; offset != nullptr && d < format_.n; ++d) {
      row[d] += offset[d];
    }
    if (!is_direct) {
      Restore(buffer, head);
      StoreRow(buffer, PlainFormat(dtype, format_.n), io);
    }
  }

 private:
  // Returns whether the codec can take rows of the IO tensor where they are.
  bool IsStoredAsGiven(int dtype) const {
    return dtype == KVX_DTYPE_F32 && mean_ == nullptr && !is_rotated_;
  }
  // Subtracts the mean from a row and rotates it.
  void Change(float* row, int head) const {
    for (int d = 0; mean_ != nullptr && d < format_.n; ++d) {
      row[d] -= mean_[head * format_.n + d];
    }
    if (is_rotated_) {
      RowKernels().rotate_row(row, format_.n);
    }
  }
  // The inverse of Change. The rotation is its own inverse.
  void Restore(float* row, int head) const {
    if (is_rotated_) {
      RowKernels().rotate_row(row, format_.n);
    }
    for (int d = 0; mean_ != nullptr && d < format_.n; ++d) {
      row[d] += mean_[head * format_.n + d];
    }
  }
  RowFormat FormatOf(int head) const {
    RowFormat format = format_;
    format.global_scale = factors_ != nullptr ? factors_[head] : 1.f;
    return format;
  }

  bool is_rotated_;
  const float* mean_;
  const float* factors_ = nullptr;
  RowFormat format_;
};

// The rows of an IO tensor.
class IoRows {
 public:
  IoRows(const kvx_tensor_desc_t& io, int dtype, const KvLayerView& view)
      : data_(static_cast<std::byte*>(io.data)),
        heads_(view.kv_heads),
        row_bytes_(view.head_dim * ElementBytes(dtype)) {}
  std::byte* At(int64_t token, int head) const {
    return data_ + (token * heads_ + head) * row_bytes_;
  }

 private:
  std::byte* data_;
  int64_t heads_;
  int64_t row_bytes_;
};

void RequireHost(const kvx_memory_type_t& layer, const kvx_kv_io_desc_t& io) {
  for (const kvx_memory_type_t* memory : {&layer, &io.key.memory, &io.value.memory}) {
    Require(Raw(*memory) == KVX_MEMORY_HOST, KVX_STATUS_UNSUPPORTED);
  }
}

// Returns the dtype of an IO tensor.
int FloatDtype(const kvx_tensor_desc_t& io) {
  Require(IsFloat(Raw(io.dtype)), KVX_STATUS_UNSUPPORTED);
  return Raw(io.dtype);
}

}  // namespace

void Describe(kvx_tm_layer_t* layer) {
  const turbomind::block::Layout layout = LayoutOf(layer);
  layer->block_bytes = static_cast<uint64_t>(layout.block_bytes());
  layer->scale_block_bytes = static_cast<uint64_t>(layout.scale_block_bytes());
}

void AsCache(const kvx_tm_layer_t* layer, kvx_cache_desc_t* out) {
  Require(out != nullptr && out->size >= sizeof(*out));
  const KvLayerView view = ViewOf(layer);
  const bool is_plain =
      layer->k_mean == nullptr && !HasOffsets(*layer) && (layer->flags & KVX_TM_FLAG_ROTATED) == 0;
  Require(is_plain, KVX_STATUS_UNSUPPORTED);
  kvx_cache_desc_t cache = {};
  cache.size = out->size;
  cache.num_blocks = layer->num_blocks;
  cache.block_size = layer->block_size;
  cache.num_kv_heads = layer->num_kv_heads;
  cache.head_dim = layer->head_dim;
  for (const KvSide side : {KvSide::kK, KvSide::kV}) {
    const KvCacheMode format = view.format[static_cast<int>(side)];
    kvx_tensor_desc_t& tensor = side == KvSide::kK ? cache.k : cache.v;
    tensor.size = sizeof(tensor);
    tensor.dtype = format == KvCacheMode::kNone      ? layer->dtype
                   : format == KvCacheMode::kFp8E4m3 ? KVX_DTYPE_F8_E4M3
                   : format == KvCacheMode::kFp8E5m2 ? KVX_DTYPE_F8_E5M2
                                                     : KVX_DTYPE_INVALID;
    Require(tensor.dtype != KVX_DTYPE_INVALID, KVX_STATUS_UNSUPPORTED);
    const int64_t element = ElementBytes(tensor.dtype);
    const int64_t per_head =
        static_cast<int64_t>(view.row_bytes[0] + view.row_bytes[1]) * view.block_seq_len;
    tensor.layout = KVX_LAYOUT_BLOCK_HND;
    tensor.memory = layer->memory;
    tensor.ndim = 4;
    const int64_t shape[] = {layer->num_blocks, view.kv_heads, view.block_seq_len, view.head_dim};
    const int64_t stride[] = {view.block_bytes / element, per_head / element, view.head_dim, 1};
    std::copy(shape, shape + 4, tensor.shape);
    std::copy(stride, stride + 4, tensor.stride);
    tensor.data = view.Payload(side, 0, 0);
  }
  CheckCache(&cache);
  *out = cache;
}

void WriteQuantized(const kvx_tm_layer_t* layer, const kvx_write_desc_t* write) {
  const KvLayerView view = ViewOf(layer);
  const Counts counts = CountsOf(*layer);
  CheckWrite(write, counts);
  RequireHost(layer->memory, write->io);
  Require(!HasOffsets(*layer), KVX_STATUS_UNSUPPORTED);
  const Side sides[2] = {{*layer, view, KvSide::kK}, {*layer, view, KvSide::kV}};
  const kvx_tensor_desc_t* const io[2] = {&write->io.key, &write->io.value};
  const int dtypes[2] = {FloatDtype(*io[0]), FloatDtype(*io[1])};
  const Slots slots(SlotsOf(write->slots), write->io.num_tokens, counts);
  for (const KvSide side : {KvSide::kK, KvSide::kV}) {
    const int s = static_cast<int>(side);
    const IoRows rows(*io[s], dtypes[s], view);
    slots.ForEach([&](int64_t token, int64_t block, int64_t offset) {
      for (int head = 0; head < view.kv_heads; ++head) {
        const turbomind::KvRow to = view.Row(side, block, head, static_cast<int>(offset));
        sides[s].Write(rows.At(token, head), dtypes[s], to, head);
      }
    });
  }
}

void GatherQuantized(const kvx_tm_layer_t* layer, const kvx_gather_desc_t* gather) {
  const KvLayerView view = ViewOf(layer);
  const Counts counts = CountsOf(*layer);
  CheckGather(gather, counts);
  RequireHost(layer->memory, gather->io);
  const Side sides[2] = {{*layer, view, KvSide::kK}, {*layer, view, KvSide::kV}};
  const kvx_tensor_desc_t* const io[2] = {&gather->io.key, &gather->io.value};
  const int dtypes[2] = {FloatDtype(*io[0]), FloatDtype(*io[1])};
  Require(Raw(gather->block_table.format) != KVX_BLOCK_TABLE_KV_OFFSETS, KVX_STATUS_UNSUPPORTED);
  turbomind::RowGather places;
  places.shape = counts;
  places.table = TableOf(*gather);
  const Tables tables(places);
  for (const KvSide side : {KvSide::kK, KvSide::kV}) {
    const int s = static_cast<int>(side);
    const IoRows rows(*io[s], dtypes[s], view);
    const bool has_offsets = side == KvSide::kK && view.HasKOffset();
    float offset[kMaxHeadDim] = {};
    tables.ForEach(0, [&](int64_t row, int64_t block, int64_t slot) {
      for (int head = 0; head < view.kv_heads; ++head) {
        if (has_offsets) {
          turbomind::DecodeKOffset(view, block, head, offset);
        }
        const turbomind::KvRow from = view.Row(side, block, head, static_cast<int>(slot));
        sides[s].Read(from, head, has_offsets ? offset : nullptr, dtypes[s], rows.At(row, head));
      }
    });
  }
}

}  // namespace kvx
