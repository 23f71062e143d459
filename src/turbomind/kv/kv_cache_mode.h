#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "turbomind/core/device_capability.h"
#include "turbomind/core/host_device.h"

namespace turbomind {

// The list of all KV formats (docs/kv_cache.md).
enum class KvCacheMode : unsigned char {
  kNone,
  kInt8,
  kInt4,
  kFp8E4m3,
  kFp8E5m2,
  kFp4Mx,
  kFp4Nv,
};

inline constexpr KvCacheMode kAllKvCacheModes[] = {
    KvCacheMode::kNone,    KvCacheMode::kInt8,  KvCacheMode::kInt4,  KvCacheMode::kFp8E4m3,
    KvCacheMode::kFp8E5m2, KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv,
};

// Bitmask of TurboMind's design. The only accepted integers are 0, 4, 8 and 16.
enum class QuantPolicy : int {
  kNone = 0x00,
  kReserve1 = 0x01,
  kReserve2 = 0x02,
  kCacheKVInt4 = 0x04,
  kCacheKVInt8 = 0x08,
  kCacheKVFp4 = 0x10,
};

// Resolves a quant policy on a device. Throws InvalidArgument for a value other than 0, 4, 8 and
// 16, or if the device lacks FP4 support. The message names the value and the alternatives.
KvCacheMode GetKvCacheMode(int quant_policy, const DeviceCapability& device);

// Resolves a format name ("nvfp4", "fp4", "int8", "fp8_e4m3", ...) on a device. With `strict_arch`,
// NVFP4 is rejected on CUDA devices below SM 100.
KvCacheMode GetKvCacheMode(std::string_view name, const DeviceCapability& device,
                           bool strict_arch = false);

// Returns how a device converts a format. "not needed" means 16 bit, and "hardware" that the device
// has instructions for the format. "software" means that other instructions compute the same
// values. "unsupported" means that the device cannot use the format.
const char* KvCacheConversion(KvCacheMode format, const DeviceCapability& device);

// Returns the canonical name: none, int8, int4, fp8, fp8_e5m2, mxfp4, nvfp4.
const char* ToString(KvCacheMode format);

// Returns every accepted name with its meaning, for help texts and support tables.
std::vector<std::pair<std::string, std::string>> KvCacheModeNames();

// Returns whether the format uses a constant FP32 scale per layer, KV head and side (global_scale,
// k_scale or v_scale).
constexpr bool HasGlobalScale(KvCacheMode format) {
  return format == KvCacheMode::kFp8E4m3 || format == KvCacheMode::kFp8E5m2 ||
         format == KvCacheMode::kFp4Nv;
}

// Returns whether a layer may combine these formats for K and V. Both may be equal, or 16-bit or
// 8-bit keys may be combined with 4-bit values. Keys carry most of the error.
constexpr bool IsListedPair(KvCacheMode k, KvCacheMode v) {
  const bool wide =
      k == KvCacheMode::kNone || k == KvCacheMode::kInt8 || k == KvCacheMode::kFp8E4m3;
  const bool narrow =
      v == KvCacheMode::kInt4 || v == KvCacheMode::kFp4Mx || v == KvCacheMode::kFp4Nv;
  return k == v || (wide && narrow);
}

// Throws InvalidArgument for a pair that is not listed.
void RequireListedPair(KvCacheMode k, KvCacheMode v);

// Calls fn.template operator()<M>() with the format as a template argument. It runs on the host or
// on the device, wherever fn may be called.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F>
TM_HD decltype(auto) DispatchFormat(KvCacheMode format, F&& fn) {
  switch (format) {
    case KvCacheMode::kNone:
      return fn.template operator()<KvCacheMode::kNone>();
    case KvCacheMode::kInt8:
      return fn.template operator()<KvCacheMode::kInt8>();
    case KvCacheMode::kInt4:
      return fn.template operator()<KvCacheMode::kInt4>();
    case KvCacheMode::kFp8E4m3:
      return fn.template operator()<KvCacheMode::kFp8E4m3>();
    case KvCacheMode::kFp8E5m2:
      return fn.template operator()<KvCacheMode::kFp8E5m2>();
    case KvCacheMode::kFp4Mx:
      return fn.template operator()<KvCacheMode::kFp4Mx>();
    case KvCacheMode::kFp4Nv:
      return fn.template operator()<KvCacheMode::kFp4Nv>();
  }
  __builtin_unreachable();
}

}  // namespace turbomind
