#pragma once

// ⑧ Tokens sampled on the GPU: Device::SampleRows.

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// `params.samples` on the host; `samples` the same on the GPU. ids and logits are the GPU's. Tokens
// do not depend on the batch. Left to the host beside rows that the sampler refuses: a sample from
// more of the most likely tokens than a list holds, about 190 of a vocabulary of 32000 and 256 of
// one of 45000 or more. Uses the workspace: 3/256 of the rows' bytes.
void CudaSampleRows(const Context& ctx, const SampleRowsParams& params,
                    const RowSampling* samplings);

}  // namespace turbomind::cuda
