#include <algorithm>
#include <initializer_list>

#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/backend/cuda/runtime/used_gpu.h"
#include "turbomind/backend/cuda/transfer/row_transfer.cuh"
#include "turbomind/backend/cuda/transfer/row_transfer.h"

namespace turbomind::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kMaxBlocks = 8192;  // several for every multiprocessor
constexpr int64_t kMaxUnitBytes = 16;

__global__ void __launch_bounds__(kMaxThreads) WriteRows(const TransferParams<RowWrite> params) {
  BeginKernel();
  const int side = BlockIndexY();
  for (int64_t row = BlockIndexX(); row < params.num_rows; row += params.num_blocks) {
    WriteToken(params.job, params.job.sides[side], params.units[side], row);
  }
}

__global__ void __launch_bounds__(kMaxThreads) GatherRows(const TransferParams<RowGather> params) {
  BeginKernel();
  const int side = BlockIndexY();
  for (int64_t row = BlockIndexX(); row < params.num_rows; row += params.num_blocks) {
    GatherToken(params.job, side, params.units[side], row);
  }
}

// Return the largest power of two, at most 16, that divides all numbers. Zero has every divisor.
int64_t CommonUnit(std::initializer_list<int64_t> numbers) {
  int64_t all = kMaxUnitBytes;
  for (const int64_t number : numbers) {
    all |= number;
  }
  return all & -all;
}

int64_t AddressOf(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

// Return how many values of a row can move at once. `places` has the addresses and distances of
// blocks in the cache.
uint32_t ValuesOf(const TransferSide& side, const PagedShape& shape, int64_t places) {
  const PagedView& cache = side.cache;
  const int64_t cache_bytes = BytesOf(side.cache_type);
  const int64_t row_bytes = BytesOf(side.row_type);
  if (cache.value != cache_bytes && cache.pack > 1) {
    return 1;
  }
  const int64_t in_cache =
      CommonUnit({places, cache.token, cache.head, cache.chunk, cache.pack * cache_bytes});
  const int64_t in_rows = CommonUnit({AddressOf(side.rows), shape.head_dim * row_bytes});
  if (side.cache_type == side.row_type) {
    return static_cast<uint32_t>(std::min(in_cache, in_rows) / cache_bytes);
  }
  const bool is_aligned =
      in_cache >= kConvertedValues * cache_bytes && in_rows >= kConvertedValues * row_bytes;
  return is_aligned ? kConvertedValues : 1;
}

UnitPlan PlanOf(const TransferSide& side, const PagedShape& shape, int64_t places) {
  UnitPlan plan;
  plan.values = ValuesOf(side, shape, places);
  plan.row_units = static_cast<uint32_t>(shape.head_dim) / plan.values;
  return plan;
}

// Return the threads of a block: whole warps, enough for the units of a token.
int ThreadsOf(const UnitPlan (&plans)[2], int64_t heads) {
  const int64_t most = std::max(plans[0].row_units, plans[1].row_units);
  const int64_t units = heads > kMaxThreads ? kMaxThreads : most * heads;
  return static_cast<int>(std::min<int64_t>(kMaxThreads, (units + 31) / 32 * 32));
}

// Return the only GPU of the addresses, kEveryGpu if there is none, or kNoGpu if one is not
// accessible. Null is left out. Sets `is_shared` if they belong to several.
int FindGpu(std::initializer_list<const void*> addresses, bool* is_shared) {
  int gpu = kEveryGpu;
  for (const void* address : addresses) {
    const int found = address == nullptr ? kEveryGpu : GpuOf(address);
    if (found == kNoGpu) {
      return kNoGpu;
    }
    *is_shared = *is_shared || (found >= 0 && gpu >= 0 && found != gpu);
    gpu = found >= 0 ? found : gpu;
  }
  return gpu;
}

template <class Job>
TransferResult Queue(void (*kernel)(TransferParams<Job>), TransferParams<Job>& params,
                     Stream stream, std::initializer_list<const void*> addresses) {
  bool is_shared = false;
  const int gpu = FindGpu(addresses, &is_shared);
  if (gpu == kNoGpu || is_shared) {
    return is_shared ? TransferResult::kOtherGpu : TransferResult::kNotGpuMemory;
  }
  const int threads = ThreadsOf(params.units, params.job.shape.heads);
  for (UnitPlan& plan : params.units) {
    plan.step_heads = static_cast<uint32_t>(threads) / plan.row_units;
    plan.step_units = static_cast<uint32_t>(threads) % plan.row_units;
  }
  params.num_blocks = std::min(params.num_rows, kMaxBlocks);
  const UsedGpu used(gpu);
  Launch(kernel, {.grid_x = params.num_blocks, .grid_y = 2, .threads = threads}, stream, params);
  return TransferResult::kQueued;
}

}  // namespace

TransferResult QueueWrite(const RowWrite& write, Stream stream) {
  TransferParams<RowWrite> params;
  params.job = write;
  params.num_rows = write.num_rows;
  for (int i = 0; i < 2; ++i) {
    const PagedView& cache = write.sides[i].cache;
    params.units[i] = PlanOf(write.sides[i], write.shape, AddressOf(cache.base) | cache.block);
  }
  const auto& [k, v] = write.sides;
  return Queue(WriteRows, params, stream,
               {k.cache.base, v.cache.base, k.rows, v.rows, k.scales.data, v.scales.data,
                write.slots.slots.data});
}

TransferResult QueueGather(const RowGather& gather, Stream stream) {
  TransferParams<RowGather> params;
  params.job = gather;
  params.num_rows = gather.num_rows();
  const BlockPools& pools = gather.pools;
  const bool has_pools = gather.table.format == TableFormat::kOffsets;
  for (int i = 0; i < 2; ++i) {
    const PagedView& cache = gather.sides[i].cache;
    const int64_t places =
        has_pools ? AddressOf(pools.primary) | AddressOf(pools.secondary) | pools.bytes_per_block
                  : AddressOf(cache.base) | cache.block;
    params.units[i] = PlanOf(gather.sides[i], gather.shape, places);
  }
  const auto& [k, v] = gather.sides;
  const TableMap& table = gather.table;
  return Queue(GatherRows, params, stream,
               {k.cache.base, v.cache.base, k.rows, v.rows, pools.primary, pools.secondary,
                table.indices.data, table.indptr.data, table.lengths.data});
}

}  // namespace turbomind::cuda
