#include "kvx/src/jobs.h"

#include <initializer_list>

#include "kvx/src/place.h"
#include "kvx/src/validate.h"

namespace kvx {
namespace {

using turbomind::IndexArray;
using turbomind::RowScales;
using turbomind::RowType;
using turbomind::TransferSide;

static_assert(static_cast<int>(RowType::kF16) == KVX_DTYPE_F16);
static_assert(static_cast<int>(RowType::kBF16) == KVX_DTYPE_BF16);
static_assert(static_cast<int>(RowType::kF32) == KVX_DTYPE_F32);
static_assert(static_cast<int>(RowType::kE4M3) == KVX_DTYPE_F8_E4M3);
static_assert(static_cast<int>(RowType::kE5M2) == KVX_DTYPE_F8_E5M2);
static_assert(static_cast<int>(turbomind::TableFormat::kPacked) == KVX_BLOCK_TABLE_PACKED);
static_assert(static_cast<int>(turbomind::TableFormat::kRagged) == KVX_BLOCK_TABLE_RAGGED);
static_assert(static_cast<int>(turbomind::TableFormat::kOffsets) == KVX_BLOCK_TABLE_KV_OFFSETS);

IndexArray ArrayOf(const void* data, const kvx_dtype_t& dtype) {
  return {data, Raw(dtype) == KVX_DTYPE_S64};
}

// Throws Refusal unless an array of a transfer on a GPU is aligned to its elements.
void RequireAligned(const IndexArray& array) {
  Require(IsAligned(array.data, array.is_wide ? 8 : 4), KVX_STATUS_UNSUPPORTED);
}

// Returns whether all memory is a GPU's. Throws Refusal if some of it is and some is not.
bool IsOnGpu(std::initializer_list<const kvx_memory_type_t*> memories) {
  size_t num_gpu = 0;
  for (const kvx_memory_type_t* memory : memories) {
    const int raw = Raw(*memory);
    Require(raw != KVX_MEMORY_UNKNOWN, KVX_STATUS_UNSUPPORTED);
    num_gpu += raw != KVX_MEMORY_HOST;
  }
  Require(num_gpu == 0 || num_gpu == memories.size(), KVX_STATUS_UNSUPPORTED);
  return num_gpu > 0;
}

TransferSide SideOf(const kvx_tensor_desc_t& cache, const kvx_tensor_desc_t& io,
                    const Counts& counts) {
  TransferSide side;
  side.cache = ViewOf(cache, counts.head_dim);
  side.cache_type = static_cast<RowType>(Raw(cache.dtype));
  side.rows = static_cast<std::byte*>(io.data);
  side.row_type = static_cast<RowType>(Raw(io.dtype));
  return side;
}

// REQUIRES: CheckWrite accepted the descriptor.
RowScales ScalesOf(const kvx_scale_desc_t& desc, const void* per_tensor, const Counts& counts) {
  if (!CheckScales(desc, counts)) {
    return {static_cast<const std::byte*>(per_tensor)};
  }
  RowScales scales = {static_cast<const std::byte*>(desc.data)};
  const int granularity = Raw(desc.granularity);
  const auto stride = [&](int i) {
    return desc.shape[i] > 1 ? desc.stride[i] * static_cast<int64_t>(sizeof(float)) : 0;
  };
  if (granularity == KVX_SCALE_PER_BLOCK || granularity == KVX_SCALE_PER_BLOCK_HEAD) {
    scales.block = stride(0);
  }
  if (granularity == KVX_SCALE_PER_HEAD || granularity == KVX_SCALE_PER_BLOCK_HEAD) {
    scales.head = stride(granularity == KVX_SCALE_PER_HEAD ? 0 : 1);
  }
  return scales;
}

}  // namespace

turbomind::SlotMap SlotsOf(const kvx_slot_mapping_t& slots) {
  return {ArrayOf(slots.slots, slots.dtype), slots.invalid_slot};
}

turbomind::TableMap TableOf(const kvx_gather_desc_t& gather) {
  const kvx_block_table_t& table = gather.block_table;
  return {.indices = ArrayOf(table.indices, table.index_dtype),
          .indptr = ArrayOf(table.indptr, table.indptr_dtype),
          .lengths = ArrayOf(gather.seq_lens.lengths, gather.seq_lens.dtype),
          .format = static_cast<turbomind::TableFormat>(Raw(table.format)),
          .num_seqs = table.seq_count,
          .max_seq_len = gather.max_seq_len,
          .max_blocks_per_seq = table.max_blocks_per_seq,
          .num_indices = table.indices_count};
}

Job<turbomind::RowWrite> MakeJob(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write) {
  const Counts counts = CheckCache(cache);
  CheckWrite(write, counts);
  const kvx_kv_io_desc_t& io = write->io;
  Job<turbomind::RowWrite> job;
  job.is_on_gpu = IsOnGpu({&cache->k.memory, &cache->v.memory, &io.key.memory, &io.value.memory});
  turbomind::RowWrite& rows = job.rows;
  rows.shape = counts;
  rows.sides[0] = SideOf(cache->k, io.key, counts);
  rows.sides[1] = SideOf(cache->v, io.value, counts);
  rows.sides[0].scales = ScalesOf(write->k_scale_desc, write->k_scale, counts);
  rows.sides[1].scales = ScalesOf(write->v_scale_desc, write->v_scale, counts);
  rows.slots = SlotsOf(write->slots);
  rows.num_rows = io.num_tokens;
  for (TransferSide& side : rows.sides) {
    const bool is_copy = side.row_type == side.cache_type;
    Require(is_copy || !IsFp8(side.row_type), KVX_STATUS_UNSUPPORTED);
    if (is_copy || !IsFp8(side.cache_type)) {
      side.scales = {};
    }
    Require(!job.is_on_gpu || IsAligned(side.scales.data, sizeof(float)), KVX_STATUS_UNSUPPORTED);
  }
  if (job.is_on_gpu) {
    RequireAligned(rows.slots.slots);
  }
  return job;
}

Job<turbomind::RowGather> MakeJob(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather) {
  const Counts counts = CheckCache(cache);
  CheckGather(gather, counts);
  const kvx_kv_io_desc_t& io = gather->io;
  const bool has_offsets = Raw(gather->block_table.format) == KVX_BLOCK_TABLE_KV_OFFSETS;
  Job<turbomind::RowGather> job;
  if (has_offsets) {
    CheckPool(*cache, counts);
    const kvx_pool_desc_t& pool = cache->pool;
    job.rows.pools = {static_cast<const std::byte*>(pool.primary),
                      static_cast<const std::byte*>(pool.secondary), pool.bytes_per_block};
  }
  job.is_on_gpu = IsOnGpu({&cache->k.memory, &cache->v.memory, &io.key.memory, &io.value.memory,
                           has_offsets ? &cache->pool.memory : &cache->k.memory});
  turbomind::RowGather& rows = job.rows;
  rows.shape = counts;
  rows.sides[0] = SideOf(cache->k, io.key, counts);
  rows.sides[1] = SideOf(cache->v, io.value, counts);
  for (const TransferSide& side : rows.sides) {
    const bool has_fp8 = IsFp8(side.row_type) || IsFp8(side.cache_type);
    Require(side.row_type == side.cache_type || !has_fp8, KVX_STATUS_UNSUPPORTED);
  }
  rows.table = TableOf(*gather);
  if (job.is_on_gpu) {
    for (const IndexArray* array : {&rows.table.indices, &rows.table.indptr, &rows.table.lengths}) {
      RequireAligned(*array);
    }
  }
  return job;
}

}  // namespace kvx
