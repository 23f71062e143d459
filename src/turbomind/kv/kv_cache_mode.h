#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "turbomind/core/host_device.h"

namespace turbomind {

// The KV cache formats: the one list (docs/kv_cache.md, "The list").
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

// Bitmask of the TurboMind design. Accepted integers are exactly 0, 4, 8 and 16.
enum class QuantPolicy : int {
  kNone = 0x00,
  kReserve1 = 0x01,
  kReserve2 = 0x02,
  kCacheKVInt4 = 0x04,
  kCacheKVInt8 = 0x08,
  kCacheKVFp4 = 0x10,
};

// What GetKvCacheMode needs to know of a device. `sm` is 0 for a CPU, else e.g. 90.
struct DeviceCapability {
  bool is_cuda = false;
  int sm = 0;
};

// Resolves a quant policy on a device. Throws InvalidArgument for any value but 0, 4, 8, 16 and for
// a device without FP4 support; the text names the value and what would work.
KvCacheMode GetKvCacheMode(int quant_policy, DeviceCapability device);

// Resolves a format name ("nvfp4", "fp4", "int8", "fp8_e4m3", ...) on a device. `strict_arch`
// refuses NVFP4 on CUDA devices below SM 100.
KvCacheMode GetKvCacheMode(std::string_view name, DeviceCapability device,
                           bool strict_arch = false);

// How a device converts a format: "not needed" (16 bit), "hardware" (it has instructions for the
// format), "software" (others do it, with the same values), or "unsupported".
const char* KvCacheConversion(KvCacheMode format, DeviceCapability device);

// Canonical name: none, int8, int4, fp8, fp8_e5m2, mxfp4, nvfp4.
const char* ToString(KvCacheMode format);

// Every accepted name with its meaning, for help texts and support tables.
std::vector<std::pair<std::string, std::string>> KvCacheModeNames();

// Whether one constant FP32 factor per layer, KV head and side scales the format.
constexpr bool HasGlobalScale(KvCacheMode format) {
  return format == KvCacheMode::kFp8E4m3 || format == KvCacheMode::kFp8E5m2 ||
         format == KvCacheMode::kFp4Nv;
}

// Formats that the K and V of a layer may have: the same for both, or 16-bit or 8-bit keys, which
// carry most of the error, over 4-bit values.
constexpr bool IsListedPair(KvCacheMode k, KvCacheMode v) {
  const bool wide =
      k == KvCacheMode::kNone || k == KvCacheMode::kInt8 || k == KvCacheMode::kFp8E4m3;
  const bool narrow =
      v == KvCacheMode::kInt4 || v == KvCacheMode::kFp4Mx || v == KvCacheMode::kFp4Nv;
  return k == v || (wide && narrow);
}

// Throws InvalidArgument for a pair that is not listed.
void RequireListedPair(KvCacheMode k, KvCacheMode v);

// Calls fn.template operator()<M>() with the mode as a template argument: where fn may be called.
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
