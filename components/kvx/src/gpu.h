#pragma once

#include "turbomind/backend/row_transfer.h"

namespace kvx {

// Queue the work on a stream of the GPU, with the CUDA library that lies beside libkvx. It is
// loaded by the first call. Throw Refusal: UNSUPPORTED without the library and for memory of
// several GPUs, INVALID_ARGUMENT for memory that no GPU can access, and INTERNAL_ERROR for the
// driver's errors.
void WriteOnGpu(const turbomind::RowWrite& write, void* stream);
void GatherOnGpu(const turbomind::RowGather& gather, void* stream);
void WaitForStream(void* stream, void* other);

}  // namespace kvx
