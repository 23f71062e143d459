#pragma once

#include "kvx/kvx_abi.h"
#include "turbomind/backend/row_transfer.h"

namespace kvx {

// The work of kvx_write_kv and kvx_gather_kv. Throw Refusal, before anything is written. Work on
// memory of a GPU is queued on the stream.
void WriteKv(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, void* stream);
void GatherKv(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, void* stream);

// The same for host memory. Check slots, tables, lengths and scales.
void WriteOnHost(const turbomind::RowWrite& write);
void GatherOnHost(const turbomind::RowGather& gather);

}  // namespace kvx
