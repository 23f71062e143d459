#pragma once

#include "kvx/kvx_abi.h"

namespace kvx {

// The work of kvx_write_kv and kvx_gather_kv. Throw Refusal before anything is written.
void WriteKv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write);
void GatherKv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather);

}  // namespace kvx
