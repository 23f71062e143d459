#pragma once

// Checks of the public structs. Each rule has its sentence in kvx/kvx_abi.h. Enumerators arrive
// from C, so they are read as integers before anything depends on them.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvx/kvx_abi.h"

namespace kvx {

// The reason for which a call returns a status other than OK.
struct Refusal {
  kvx_status_t status;
};

inline void Require(bool ok, kvx_status_t status = KVX_STATUS_INVALID_ARGUMENT) {
  if (!ok) {
    throw Refusal{status};
  }
}

// Returns an enumerator of an untrusted struct as an integer.
template <class Enum>
int Raw(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int));
  int raw;
  std::memcpy(&raw, &value, sizeof(raw));
  return raw;
}

// The counts of a cache, all positive.
struct Counts {
  int64_t blocks = 0;
  int64_t block_size = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;

  int64_t num_slots() const { return blocks * block_size; }
};

bool IsFp8(int dtype);
bool IsFloat(int dtype);  // F16, BF16 or F32
// Returns the size of a dtype of cache or IO tensors. REQUIRES: it is one of them.
int64_t ElementBytes(int dtype);

// Throw Refusal.
void RequireHost(const kvx_memory_type_t& memory);
void CheckMemoryType(const kvx_memory_type_t& memory);
Counts CheckCache(const kvx_cache_desc_t* cache);  // its memory may be of any type
void RequireHostCache(const kvx_cache_desc_t& cache);
void CheckWrite(const kvx_write_desc_t* write, const Counts& counts);
void CheckGather(const kvx_gather_desc_t* gather, const Counts& counts);
// Checks what KV_OFFSETS adds to a cache.
void CheckPool(const kvx_cache_desc_t& cache, const Counts& counts);
// Returns false if the descriptor holds no scales.
bool CheckScales(const kvx_scale_desc_t& scales, const Counts& counts);

}  // namespace kvx
