#include "kvx/src/validate.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

namespace kvx {
namespace {

constexpr int64_t kVectorBytes = 16;

bool IsIndex(const kvx_dtype_t& dtype) {
  return Raw(dtype) == KVX_DTYPE_S32 || Raw(dtype) == KVX_DTYPE_S64;
}

// Throws Refusal if the product does not fit.
int64_t Product(int64_t a, int64_t b) {
  int64_t product = 0;
  Require(!__builtin_mul_overflow(a, b, &product));
  return product;
}

struct Dimension {
  int64_t size;
  int64_t stride;
};

// Returns the distance from the first to the last element. Two elements share no address if each
// stride exceeds the extent of the dimensions with smaller strides. Throws Refusal.
int64_t NestedExtent(const Dimension* dims, int ndim) {
  std::array<Dimension, KVX_MAX_TENSOR_DIMS> sorted;
  std::copy(dims, dims + ndim, sorted.begin());
  for (int i = 1; i < ndim; ++i) {
    for (int j = i; j > 0 && sorted[j].stride < sorted[j - 1].stride; --j) {
      std::swap(sorted[j], sorted[j - 1]);
    }
  }
  int64_t extent = 0;
  for (int i = 0; i < ndim; ++i) {
    if (sorted[i].size > 1) {
      Require(sorted[i].stride > extent, KVX_STATUS_UNSUPPORTED);
      Require(
          !__builtin_add_overflow(extent, Product(sorted[i].size - 1, sorted[i].stride), &extent));
    }
  }
  return extent;
}

bool IsRowMajor(const Dimension* dims, int ndim) {
  int64_t wanted = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (dims[i].size > 1 && dims[i].stride != wanted) {
      return false;
    }
    wanted = Product(wanted, dims[i].size);
  }
  return true;
}

void CheckStrides(const kvx_tensor_desc_t& tensor) {
  const int ndim = static_cast<int>(tensor.ndim);
  const int64_t element = ElementBytes(Raw(tensor.dtype));
  std::array<Dimension, KVX_MAX_TENSOR_DIMS> dims = {};
  for (int i = 0; i < ndim; ++i) {
    Require(tensor.stride[i] >= 0, KVX_STATUS_UNSUPPORTED);
    dims[i] = {tensor.shape[i], tensor.stride[i]};
  }
  Product(NestedExtent(dims.data(), ndim) + 1, element);
  if (Raw(tensor.layout) == KVX_LAYOUT_BLOCK_CUSTOM || IsRowMajor(dims.data(), ndim)) {
    return;
  }
  for (int i = 0; i < ndim - 1; ++i) {
    const bool is_whole = Product(dims[i].stride, element) % kVectorBytes == 0;
    Require(is_whole || dims[i].size == 1, KVX_STATUS_UNSUPPORTED);
  }
}

void CheckShape(const kvx_tensor_desc_t& tensor, std::initializer_list<int64_t> wanted) {
  Require(tensor.ndim == wanted.size());
  Require(std::equal(wanted.begin(), wanted.end(), tensor.shape));
}

void CheckCacheTensor(const kvx_tensor_desc_t& tensor, const Counts& counts) {
  Require(tensor.size >= sizeof(tensor));
  const int dtype = Raw(tensor.dtype);
  Require(IsFloat(dtype) || IsFp8(dtype));
  CheckMemoryType(tensor.memory);
  const auto [blocks, block_size, heads, head_dim] = counts;
  switch (Raw(tensor.layout)) {
    case KVX_LAYOUT_BLOCK_NHD:
    case KVX_LAYOUT_BLOCK_CUSTOM:
      CheckShape(tensor, {blocks, block_size, heads, head_dim});
      break;
    case KVX_LAYOUT_BLOCK_HND:
      CheckShape(tensor, {blocks, heads, block_size, head_dim});
      break;
    case KVX_LAYOUT_BLOCK_HND_PACKED: {
      const int64_t pack = tensor.shape[4];
      Require(tensor.ndim == 5 && pack > 0 && head_dim % pack == 0);
      CheckShape(tensor, {blocks, heads, head_dim / pack, block_size, pack});
      break;
    }
    default:
      Require(false);
  }
  Require(tensor.data != nullptr);
  CheckStrides(tensor);
  Require(IsAligned(tensor.data, ElementBytes(dtype)), KVX_STATUS_UNSUPPORTED);
}

// Checks that a tensor is [rows, heads, head_dim], or `first_dims` instead of the rows.
void CheckIoTensor(const kvx_tensor_desc_t& tensor, const kvx_kv_io_desc_t& io,
                   std::array<int64_t, 2> first_dims) {
  Require(tensor.size >= sizeof(tensor));
  const int dtype = Raw(tensor.dtype);
  Require(IsFloat(dtype) || IsFp8(dtype));
  CheckMemoryType(tensor.memory);
  if (first_dims[0] > 0 && tensor.ndim == 4) {
    CheckShape(tensor, {first_dims[0], first_dims[1], io.num_kv_heads, io.head_dim});
  } else {
    CheckShape(tensor, {io.num_tokens, io.num_kv_heads, io.head_dim});
  }
  Require(io.num_tokens == 0 || tensor.data != nullptr);
  std::array<Dimension, KVX_MAX_TENSOR_DIMS> dims = {};
  int64_t bytes = ElementBytes(dtype);
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    dims[i] = {tensor.shape[i], tensor.stride[i]};
    bytes = Product(bytes, tensor.shape[i]);
  }
  const bool is_dense = IsRowMajor(dims.data(), static_cast<int>(tensor.ndim));
  Require(is_dense || io.num_tokens == 0, KVX_STATUS_UNSUPPORTED);
  Require(IsAligned(tensor.data, ElementBytes(dtype)), KVX_STATUS_UNSUPPORTED);
}

void CheckIo(const kvx_kv_io_desc_t& io, const Counts& counts, std::array<int64_t, 2> first_dims) {
  Require(io.size >= sizeof(io));
  Require(io.num_kv_heads == counts.heads && io.head_dim == counts.head_dim);
  CheckIoTensor(io.key, io, first_dims);
  CheckIoTensor(io.value, io, first_dims);
}

void CheckTable(const kvx_block_table_t& table, const Counts& counts) {
  Require(table.size >= sizeof(table));
  Require(table.seq_count > 0 && table.max_blocks_per_seq > 0);
  Require((table.flags & ~uint32_t{KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX}) == 0);
  Require(IsIndex(table.index_dtype));
  const int format = Raw(table.format);
  const bool is_ragged = format == KVX_BLOCK_TABLE_RAGGED;
  const auto num_rows = static_cast<unsigned __int128>(table.seq_count) * table.max_blocks_per_seq;
  switch (format) {
    case KVX_BLOCK_TABLE_PACKED:
      Require(table.beam_width == 1 && table.indices_count == num_rows);
      break;
    case KVX_BLOCK_TABLE_RAGGED:
      Require(table.beam_width == 1 && IsIndex(table.indptr_dtype) && table.indptr != nullptr);
      Require(table.indptr_count == uint64_t{table.seq_count} + 1);
      break;
    case KVX_BLOCK_TABLE_KV_OFFSETS:
      Require(Raw(table.index_dtype) == KVX_DTYPE_S32 && table.beam_width > 0);
      Require((table.flags & KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX) != 0);
      Require((counts.block_size & (counts.block_size - 1)) == 0);
      Require(table.indices_count == num_rows * 2 * table.beam_width);
      Require(table.beam_width == 1, KVX_STATUS_UNSUPPORTED);
      break;
    default:
      Require(false);
  }
  Require(is_ragged || (table.indptr == nullptr && table.indptr_count == 0));
  Require(table.indices_count == 0 || table.indices != nullptr);
}

}  // namespace

bool IsAligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

bool IsFp8(int dtype) { return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2; }

bool IsFloat(int dtype) {
  return dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 || dtype == KVX_DTYPE_F32;
}

int64_t ElementBytes(int dtype) { return IsFp8(dtype) ? 1 : (dtype == KVX_DTYPE_F32 ? 4 : 2); }

void CheckMemoryType(const kvx_memory_type_t& memory) {
  Require(Raw(memory) >= KVX_MEMORY_UNKNOWN && Raw(memory) <= KVX_MEMORY_UNIFIED);
}

Counts CheckCache(const kvx_cache_desc_t* cache) {
  Require(cache != nullptr && cache->size >= sizeof(*cache));
  const Counts counts = {cache->num_blocks, cache->block_size, cache->num_kv_heads,
                         cache->head_dim};
  Require(counts.blocks > 0 && counts.block_size > 0 && counts.heads > 0 && counts.head_dim > 0);
  if (cache->pool.size != 0) {
    Require(cache->pool.size >= sizeof(cache->pool));
    CheckMemoryType(cache->pool.memory);
  }
  CheckCacheTensor(cache->k, counts);
  CheckCacheTensor(cache->v, counts);
  return counts;
}

void CheckPool(const kvx_cache_desc_t& cache, const Counts& counts) {
  const kvx_pool_desc_t& pool = cache.pool;
  Require(pool.size != 0 && pool.bytes_per_block > 0 && pool.primary != nullptr);
  Product(counts.blocks, pool.bytes_per_block);
  for (const kvx_tensor_desc_t* tensor : {&cache.k, &cache.v}) {
    const int64_t element = ElementBytes(Raw(tensor->dtype));
    std::array<Dimension, KVX_MAX_TENSOR_DIMS> dims = {};
    for (uint32_t i = 1; i < tensor->ndim; ++i) {
      dims[i - 1] = {tensor->shape[i], tensor->stride[i]};
    }
    const int64_t extent = NestedExtent(dims.data(), static_cast<int>(tensor->ndim) - 1) + 1;
    Require(Product(extent, element) <= pool.bytes_per_block);
    const bool is_aligned = pool.bytes_per_block % element == 0 &&
                            IsAligned(pool.primary, element) && IsAligned(pool.secondary, element);
    Require(is_aligned, KVX_STATUS_UNSUPPORTED);
  }
}

bool CheckScales(const kvx_scale_desc_t& scales, const Counts& counts) {
  if (scales.size == 0) {
    return false;
  }
  Require(scales.size >= sizeof(scales));
  const int granularity = Raw(scales.granularity);
  Require(granularity >= KVX_SCALE_NONE && granularity <= KVX_SCALE_PER_BLOCK_HEAD);
  if (granularity == KVX_SCALE_NONE || scales.data == nullptr) {
    return false;
  }
  Require(Raw(scales.dtype) == KVX_DTYPE_F32);
  const auto has_shape = [&](std::initializer_list<int64_t> wanted) {
    return scales.ndim == wanted.size() && std::equal(wanted.begin(), wanted.end(), scales.shape);
  };
  const bool is_right[] = {true, scales.ndim == 0 || has_shape({1}), has_shape({counts.blocks}),
                           has_shape({counts.heads}), has_shape({counts.blocks, counts.heads})};
  Require(is_right[granularity]);
  for (uint32_t i = 0; i < scales.ndim; ++i) {
    Require(scales.stride[i] >= 0, KVX_STATUS_UNSUPPORTED);
    Product(Product(scales.shape[i], scales.stride[i]), 2 * sizeof(float));
  }
  return true;
}

void CheckWrite(const kvx_write_desc_t* write, const Counts& counts) {
  Require(write != nullptr && write->size >= sizeof(*write));
  CheckScales(write->k_scale_desc, counts);
  CheckScales(write->v_scale_desc, counts);
  const kvx_slot_mapping_t& slots = write->slots;
  Require(slots.size >= sizeof(slots) && IsIndex(slots.dtype));
  Require(slots.token_count == write->io.num_tokens);
  Require(slots.token_count == 0 || slots.slots != nullptr);
  CheckIo(write->io, counts, {0, 0});
}

void CheckGather(const kvx_gather_desc_t* gather, const Counts& counts) {
  Require(gather != nullptr && gather->size >= sizeof(*gather) && gather->max_seq_len > 0);
  const kvx_seq_lens_t& lens = gather->seq_lens;
  Require(lens.size >= sizeof(lens) && IsIndex(lens.dtype) && lens.lengths != nullptr);
  Require(lens.seq_count == gather->block_table.seq_count);
  Require(gather->io.num_tokens == uint64_t{lens.seq_count} * gather->max_seq_len);
  CheckTable(gather->block_table, counts);
  CheckIo(gather->io, counts, {lens.seq_count, gather->max_seq_len});
}

}  // namespace kvx
