#pragma once

// GPUs, through libturbomind_cuda.so, which is looked for when first asked: the file that
// LMDEPLOY_CUDA_LIBRARY names, else the one beside the file this code is in. Once loaded it stays.
// Any thread.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/backend/cuda_library.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// In the driver's order. Empty: `why_none` says in one line why CUDA is not used (no library, one
// of another version, no driver, an old driver, no GPU). Takes no memory of the GPUs.
std::vector<CudaDeviceInfo> CudaDevices(std::string* why_none = nullptr);

// Of the whole GPU, for all processes. Throws InvalidArgument like MakeCudaDevice.
int64_t CudaFreeBytes(int ordinal);

// `ordinal` is an index into CudaDevices(). Throws InvalidArgument, in one line, where the GPU
// cannot be used.
std::shared_ptr<Device> MakeCudaDevice(int ordinal, const CudaDeviceOptions& options);

// What the library's stamp has to be.
const char* CudaStamp();

}  // namespace turbomind
