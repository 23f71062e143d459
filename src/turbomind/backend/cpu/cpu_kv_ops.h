#pragma once

// ⑥⑦ The KV cache ops of the CPU device: they cut the work into items of the thread pool and call
// the kernels of one instruction set. How the work is cut never changes a bit of the result. The
// arguments have been checked (ops/). One thread calls them.

#include <cstddef>
#include <cstdint>
#include <new>
#include <string_view>
#include <vector>

#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// The kernels of "scalar", "avx2", "avx512" or "amx", which this machine must be able to run
// (AvailableCpuIsas). Throws InvalidArgument for another name.
CpuKvKernels CpuKvKernelsFor(std::string_view isa);

void CpuWriteKv(const CpuKvKernels& kernels, ThreadPool& pool, const WriteKvParams& params);
void CpuQuantizeBlocks(const CpuKvKernels& kernels, ThreadPool& pool,
                       const QuantizeBlocksParams& params);
void CpuFlattenKV(const CpuKvKernels& kernels, ThreadPool& pool, const FlattenKVParams& params);

// Working memory of the attention ops, kept from call to call: taken and given back in each, it
// would leave holes between the small things that stay, and the heap would grow with the cache.
class CpuKvScratch {
 public:
  CpuKvScratch() = default;
  ~CpuKvScratch() { Free(); }
  CpuKvScratch(const CpuKvScratch&) = delete;
  CpuKvScratch& operator=(const CpuKvScratch&) = delete;

  // 64-byte aligned, of undefined content; valid until the next call. Throws std::bad_alloc.
  float* Get(int64_t num_floats);

  std::vector<int64_t> starts;  // of a call's sequences, in items

 private:
  static constexpr std::align_val_t kAlignment{64};
  void Free();

  float* floats_ = nullptr;
  size_t size_ = 0;
};

void CpuPrefillAttention(const CpuKvKernels& kernels, ThreadPool& pool, CpuKvScratch& memory,
                         const AttentionParams& params);
void CpuDecodeAttention(const CpuKvKernels& kernels, ThreadPool& pool, CpuKvScratch& memory,
                        const AttentionParams& params);

// Rows without a cache around them, for tests and reports.
struct CodecRows {
  KvCacheMode format = KvCacheMode::kNone;
  DataType dtype = DataType::kBFloat16;
  float global_scale = 1.f;
  int64_t num_rows = 0;
  int head_dim = 0;
  bool search = false;  // FP4 scales by least squared error
};
// rows [num_rows, head_dim] → payload [num_rows, block::RowBytes] and metadata [num_rows,
// block::ParamBytes + block::ScaleBytes]. Returns the number of NaN and infinite values. Throws
// InvalidArgument for a head_dim that the mode cannot store and for a factor global_scale that is
// not positive and finite.
int64_t EncodeRows(const CpuKvKernels& kernels, const CodecRows& shape, const float* rows,
                   uint8_t* payload, uint8_t* metadata);
void DecodeRows(const CpuKvKernels& kernels, const CodecRows& shape, const uint8_t* payload,
                const uint8_t* metadata, float* rows);

}  // namespace turbomind
