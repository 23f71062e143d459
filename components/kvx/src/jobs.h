#pragma once

// Descriptors as the structs that move rows: turbomind/backend/row_transfer.h.

#include "kvx/kvx_abi.h"
#include "turbomind/backend/row_transfer.h"

namespace kvx {

// A transfer, and whether its memory is a GPU's.
template <class Rows>
struct Job {
  Rows rows;
  bool is_on_gpu = false;
};

// REQUIRES: CheckWrite and CheckGather accepted them.
turbomind::SlotMap SlotsOf(const kvx_slot_mapping_t& slots);
turbomind::TableMap TableOf(const kvx_gather_desc_t& gather);

// Check everything but the contents of memory. Throw Refusal.
Job<turbomind::RowWrite> MakeJob(const kvx_cache_desc_t* cache, const kvx_write_desc_t* write);
Job<turbomind::RowGather> MakeJob(const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather);

}  // namespace kvx
