#include "turbomind/ops/checkpoints.h"

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// Returns whether the formats differ, so that values must be converted.
bool Converts(const StateCopyParams& p) {
  return p.format != StateFormat::kF32 && p.shape.rows > 0;
}

void CheckCopies(const StateCopyParams& p) {
  Check(p.copies != nullptr && p.num_copies > 0, "the copies must be set");
  Check(p.states.data != nullptr && p.checkpoints.data != nullptr, "the pools must be set");
  Check(p.states.slot_bytes == p.shape.Bytes(StateFormat::kF32) &&
            p.checkpoints.slot_bytes == p.shape.Bytes(p.format),
        "the slots must have the sizes of their formats");
  Check(p.shape.exact_bytes % 64 == 0 && p.shape.cols % 16 == 0,
        "exact_bytes must be a multiple of 64, and cols of 16");
  for (int i = 0; i < p.num_copies; ++i) {
    Check(p.copies[i].slot >= 0 && p.copies[i].checkpoint >= 0, "a copy must name two slots");
  }
}

}  // namespace

void invokeSaveCheckpoints(Device& device, const StateCopyParams& params) {
  CheckCopies(params);
  if (Converts(params)) {
    device.SaveCheckpoints(params);
    return;
  }
  for (int i = 0; i < params.num_copies; ++i) {
    device.Copy(params.checkpoints.At(params.copies[i].checkpoint),
                params.states.At(params.copies[i].slot),
                static_cast<size_t>(params.states.slot_bytes));
  }
}

void invokeRestoreCheckpoints(Device& device, const StateCopyParams& params) {
  CheckCopies(params);
  if (Converts(params)) {
    device.RestoreCheckpoints(params);
    return;
  }
  for (int i = 0; i < params.num_copies; ++i) {
    device.Copy(params.states.At(params.copies[i].slot),
                params.checkpoints.At(params.copies[i].checkpoint),
                static_cast<size_t>(params.states.slot_bytes));
  }
}

}  // namespace turbomind
