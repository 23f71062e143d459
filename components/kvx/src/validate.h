#pragma once

// Checks of the public structs. Each rule has its sentence in kvx/kvx_abi.h. Enumerators arrive
// from C, so they are read as integers before anything depends on them.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvx/kvx_abi.h"
#include "turbomind/backend/row_transfer.h"

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

using Counts = turbomind::PagedShape;

bool IsAligned(const void* data, int64_t bytes);
bool IsFp8(int dtype);
bool IsFloat(int dtype);  // F16, BF16 or F32
// Returns the size of a dtype of cache or IO tensors. REQUIRES: it is one of them.
int64_t ElementBytes(int dtype);

// Throw Refusal.
void CheckMemoryType(const kvx_memory_type_t& memory);
// Memory may be of any type, except that a job's has one kind (jobs.h).
Counts CheckCache(const kvx_cache_desc_t* cache);
void CheckWrite(const kvx_write_desc_t* write, const Counts& counts);
void CheckGather(const kvx_gather_desc_t* gather, const Counts& counts);
// Checks what KV_OFFSETS adds to a cache.
void CheckPool(const kvx_cache_desc_t& cache, const Counts& counts);
// Returns false if the descriptor holds no scales.
bool CheckScales(const kvx_scale_desc_t& scales, const Counts& counts);

}  // namespace kvx
