#pragma once

// Access to GPUs through libturbomind_cuda.so. The library is searched on the first call: the file
// in LMDEPLOY_CUDA_LIBRARY, else the one in the folder of the file that contains this code. Once
// loaded it stays loaded. Any thread may call.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/backend/cuda_library.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// Returns the GPUs in the driver's order. If the result is empty, `why_none` gives the reason in
// one line (no library, wrong version, no driver, old driver, no GPU). Allocates no GPU memory.
std::vector<CudaDeviceInfo> CudaDevices(std::string* why_none = nullptr);

// Makes a device. `ordinal` is an index into CudaDevices(). Throws InvalidArgument, in one line, if
// the GPU cannot be used.
std::shared_ptr<Device> MakeCudaDevice(int ordinal, const CudaDeviceOptions& options);

// Returns the library, or null: then `why_none` gives the reason in one line.
const CudaLibrary* FindCudaLibrary(std::string* why_none = nullptr);

// Returns the stamp that the library must have.
const char* CudaStamp();

}  // namespace turbomind
