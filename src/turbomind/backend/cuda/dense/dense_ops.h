#pragma once

// ⑥⑦ The small ops between the matrix products, on the GPU, as specified in ops/params.h. All
// pointers except FillRopeParams::table are GPU addresses. A row's result does not depend on its
// batch.

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

void CudaFillRope(const Context& ctx, const FillRopeParams& params);
void CudaNorm(const Context& ctx, const NormParams& params);
void CudaAdd(const Context& ctx, const AddParams& params);
void CudaSoftCap(const Context& ctx, const SoftCapParams& params);
void CudaGatedActivation(const Context& ctx, const GatedActivationParams& params);
void CudaRouteExperts(const Context& ctx, const RouteExpertsParams& params);
void CudaAssignExperts(const Context& ctx, const AssignExpertsParams& params);
void CudaGroupRows(const Context& ctx, const GroupRowsParams& params);
void CudaCombineExperts(const Context& ctx, const CombineExpertsParams& params);
// Uses the workspace: 8 bytes per part of a row.
void CudaArgMaxRows(const Context& ctx, const ArgMaxRowsParams& params);

}  // namespace turbomind::cuda
