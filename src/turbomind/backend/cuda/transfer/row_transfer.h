#pragma once

// Launchers of the kernels that move rows between paged caches and dense tensors in GPU memory, for
// libkvx. They queue one kernel on the caller's stream, which may be null, and neither wait nor
// allocate, so a transfer can be recorded in a graph. Any thread may call.
//
// Tables, slots and lengths are read on the GPU, so nobody checks them before. A row whose slot,
// entry, length or scale lies outside is left as it was. Nothing outside of the cache, the rows and
// the tables is accessed, provided that the descriptors name memory of the right size.

#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/backend/row_transfer.h"
#include "turbomind/ops/copy_heads.h"

namespace turbomind::cuda {

// REQUIRES: arrays are aligned to their elements. Throw InternalError with the driver's message.
TransferResult QueueWrite(const RowWrite& write, Stream stream);
TransferResult QueueGather(const RowGather& gather, Stream stream);

// Device::CopyHeads. REQUIRES: the array is aligned to its elements, and `rows` to 16 bytes.
void CudaCopyHeads(Stream stream, const CopyHeadsParams& params);

}  // namespace turbomind::cuda
