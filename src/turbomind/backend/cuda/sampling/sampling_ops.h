#pragma once

// ⑧ Samples tokens on the GPU: Device::SampleRows.

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// `params.samples` is on the host, `samples` is its copy on the GPU. ids and logits are on the GPU.
// The sampled tokens do not depend on the batch. Uses the workspace: 3/256 of the rows' bytes.
//
// The host samples the rows that the sampler refuses. It also samples rows that need more of the
// most likely tokens than a list holds: about 190 for a vocabulary of 32000, and 256 from 45000 on.
void CudaSampleRows(const Context& ctx, const SampleRowsParams& params,
                    const RowSampling* samplings);

}  // namespace turbomind::cuda
