#pragma once

// ⑥ Convert rows of floats to payload and metadata, and back.

#include "turbomind/backend/cpu/row_kernels.h"

namespace turbomind::TM_ISA {

RowCounts EncodeRow(const RowFormat& format, const float* row, uint8_t* payload, uint8_t* metadata);
void DecodeRow(const RowFormat& format, const uint8_t* payload, const uint8_t* metadata,
               float* row);

}  // namespace turbomind::TM_ISA
