#pragma once

// ⑥ Rows of floats ↔ payload and metadata, for FillKvKernels.

#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

int EncodeRow(KvCacheMode mode, const float* row, int n, DataType dtype, float g, uint8_t* payload,
              uint8_t* metadata);
void DecodeRow(KvCacheMode mode, const uint8_t* payload, const uint8_t* metadata, int n,
               DataType dtype, float g, float* row);
int ProcessHead(const ProcessHeadArgs& args);

}  // namespace turbomind::TM_ISA
