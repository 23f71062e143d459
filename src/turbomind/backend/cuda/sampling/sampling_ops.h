#pragma once

// ⑧ Tokens drawn on the GPU: Device::DrawRows.

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// `params.draws` on the host; `draws` the same on the GPU. ids and logits are the GPU's. Tokens do
// not depend on the batch. Left to the host beside rows that the sampler refuses: a draw from more
// of the most likely tokens than a list holds, about 190 of a vocabulary of 32000 and 256 of one
// of 45000 or more. Uses the workspace: 3/256 of the rows' bytes.
void CudaDrawRows(const Context& ctx, const DrawRowsParams& params, const RowDraw* draws);

}  // namespace turbomind::cuda
