#pragma once

// A GPU as the engine's device.

#include <memory>

#include "turbomind/core/device.h"

namespace turbomind::cuda {

struct DeviceOptions {
  bool deterministic = false;  // rows of the results do not depend on the batch
  int num_threads = 1;         // of the host: weights are packed and rows sampled on them
};

// Throws InvalidArgument for a GPU that is not there or too old, InternalError with the driver's
// words.
std::unique_ptr<Device> MakeDevice(int gpu, const DeviceOptions& options);

}  // namespace turbomind::cuda
