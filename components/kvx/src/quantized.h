#pragma once

#include "kvx/kvx_turbomind.h"

namespace kvx {

// The work of the functions of kvx_turbomind.h. Throw Refusal, or InvalidArgument for sizes that
// block::Layout rejects, before anything is written.
void Describe(kvx_tm_layer_t* layer);
void AsCache(const kvx_tm_layer_t* layer, kvx_cache_desc_t* out);
void WriteQuantized(const kvx_tm_layer_t* layer, const kvx_write_desc_t* write);
void GatherQuantized(const kvx_tm_layer_t* layer, const kvx_gather_desc_t* gather);

}  // namespace kvx
