#pragma once

// What the machine allows, measured with a device's own threads and instruction set: the two
// ceilings of a profile, bytes read and multiply-adds done per second.

#include <cstdint>
#include <string>

#include "turbomind/backend/cpu/ceiling_kernels.h"
#include "turbomind/core/thread_pool.h"

namespace turbomind {

// Of the core we run on, as the kernel tells; typical sizes where it does not.
struct CacheSizes {
  int64_t l2_bytes = int64_t{1} << 20;   // of one core
  int64_t l3_bytes = int64_t{32} << 20;  // of one last-level cache
  int num_l3 = 1;                        // of them in the machine
};

CacheSizes ReadCacheSizes();

struct ReadCeiling {
  double bytes_per_s = 0.0;  // all threads together; 0: not measured
  int64_t working_set = 0;   // bytes that were read again and again, by all threads together
};

struct CpuCeilings {
  std::string isa;
  int num_threads = 0;
  CacheSizes caches;
  // A working set of at least 512 MB and four times L3 where there was time to write it first.
  ReadCeiling memory;
  ReadCeiling l3;  // not measured where the threads' share of L3 is less than two L2
  ReadCeiling l2;
  // Multiply-adds times 2 per second, all threads together. 0: the instruction set has no such
  // instruction.
  double int8_ops_per_s = 0.0;
  double bf16_ops_per_s = 0.0;
  double fp32_ops_per_s = 0.0;
  double tile_int8_ops_per_s = 0.0;  // on matrix tiles (AMX)
  double tile_bf16_ops_per_s = 0.0;
};

// Medians of short runs that take about `seconds` together. Leaves isa empty. Throws
// InvalidArgument for seconds outside (0, 60].
CpuCeilings MeasureCeilings(const CpuCeilingKernels& kernels, ThreadPool& pool, double seconds);

}  // namespace turbomind
