#pragma once

// ⑥⑦ The KV cache ops of the CPU device. They split the work into items of the thread pool and call
// the kernels of one instruction set. Threads never change a bit of the result. The arguments
// are already checked (ops/). Call them from one thread.

#include <cstddef>
#include <cstdint>
#include <new>
#include <string_view>
#include <vector>

#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/core/thread_pool.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// Returns the kernels of "scalar", "avx2", "avx512" or "amx". Throws InvalidArgument for any other
// name. REQUIRES: this machine can run the instruction set (AvailableCpuIsas).
CpuKvKernels CpuKvKernelsFor(std::string_view isa);

void CpuWriteKv(const CpuKvKernels& kernels, ThreadPool& pool, const WriteKvParams& params);
void CpuQuantizeBlocks(const CpuKvKernels& kernels, ThreadPool& pool,
                       const QuantizeBlocksParams& params);
void CpuFlattenKV(const CpuKvKernels& kernels, ThreadPool& pool, const FlattenKVParams& params);

// Working memory of the attention ops, kept from call to call. Allocating it per call would leave
// holes between small, long-lived allocations, and the heap would grow with the cache.
class CpuKvScratch {
 public:
  CpuKvScratch() = default;
  ~CpuKvScratch() { Free(); }
  CpuKvScratch(const CpuKvScratch&) = delete;
  CpuKvScratch& operator=(const CpuKvScratch&) = delete;

  // Returns 64-byte aligned memory with undefined contents, valid until the next call. Throws
  // std::bad_alloc.
  float* Get(int64_t num_floats);

  std::vector<int64_t> starts;  // first item of each sequence of a call

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

}  // namespace turbomind
