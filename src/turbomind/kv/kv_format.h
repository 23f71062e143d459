#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "turbomind/core/device_capability.h"
#include "turbomind/core/host_device.h"

namespace turbomind {

// The KV formats (docs/kv_cache.md). kKvFormats describes them.
enum class KvCacheMode : unsigned char {
  kNone,
  kInt8,
  kInt4,
  kFp8E4m3,
  kFp8E5m2,
  kFp4Mx,
  kFp4Nv,
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

// A row of the table of KV formats. Every list of names, in C++ and in Python, comes from this
// table.
struct KvFormatInfo {
  KvCacheMode format = KvCacheMode::kNone;  // if the device chooses: the CPU's choice
  bool device_chooses = false;              // the name stands for one of two formats (fp4)
  const char* name = nullptr;               // canonical
  const char* aliases[3] = {};              // other accepted names; unused entries are null
  int quant_policy = -1;                    // the option's number; -1: the format has names only
  int bits = 0;                             // payload bits per value
  int group = 0;                            // values per scale byte; 0 without scale bytes
  // A constant FP32 scale exists per layer, KV head and side (global_scale, k_scale or v_scale).
  bool has_global_scale = false;
  float max_value = 0.f;  // largest magnitude at a global scale of 1; 0 without a fixed limit
  int hardware_sm = 0;    // first CUDA architecture with conversion instructions; 0: none has them
  // A layer may combine K of a format that has pairs_as_k with V of one that has pairs_as_v. Keys
  // carry most of the error, so they have the wider format.
  bool pairs_as_k = false;
  bool pairs_as_v = false;
  const char* description = nullptr;
};

// The order is that of reports and help texts.
inline constexpr KvFormatInfo kKvFormats[] = {
    {.format = KvCacheMode::kNone,
     .name = "none",
     .aliases = {"auto", "bf16", "bfloat16"},
     .quant_policy = 0,
     .bits = 16,
     .pairs_as_k = true,
     .description = "the model's 16-bit dtype"},
    {.format = KvCacheMode::kInt8,
     .name = "int8",
     .quant_policy = 8,
     .bits = 8,
     .pairs_as_k = true,
     .description = "8-bit integers, a scale and a zero per token and head"},
    {.format = KvCacheMode::kFp8E4m3,
     .name = "fp8",
     .aliases = {"fp8_e4m3"},
     .bits = 8,
     .has_global_scale = true,
     .max_value = 448.f,
     .hardware_sm = 89,
     .pairs_as_k = true,
     .description = "8-bit floats (E4M3), one k_scale and v_scale per layer and head"},
    {.format = KvCacheMode::kFp8E5m2,
     .name = "fp8_e5m2",
     .bits = 8,
     .has_global_scale = true,
     .max_value = 57344.f,
     .hardware_sm = 89,
     .description = "8-bit floats (E5M2), one k_scale and v_scale per layer and head"},
    {.format = KvCacheMode::kFp4Nv,
     .device_chooses = true,
     .name = "fp4",
     .aliases = {"fp4_e2m1"},
     .quant_policy = 16,
     .bits = 4,
     .group = 16,
     .description = "nvfp4 or mxfp4, depending on the device"},
    {.format = KvCacheMode::kFp4Nv,
     .name = "nvfp4",
     .bits = 4,
     .group = 16,
     .has_global_scale = true,
     .max_value = 6.f * 448.f,
     .hardware_sm = 100,
     .pairs_as_v = true,
     .description = "4-bit floats (E2M1), an E4M3 scale per 16 values"},
    {.format = KvCacheMode::kInt4,
     .name = "int4",
     .quant_policy = 4,
     .bits = 4,
     .pairs_as_v = true,
     .description = "4-bit integers, a scale and a zero per token and head"},
    {.format = KvCacheMode::kFp4Mx,
     .name = "mxfp4",
     .bits = 4,
     .group = 16,
     .max_value = 6.f * 512.f,
     .hardware_sm = 100,
     .pairs_as_v = true,
     .description = "4-bit floats (E2M1), a power-of-two scale per 16 values"},
};

// Returns the row of a format. A format without a row does not compile in a constant expression.
constexpr const KvFormatInfo& InfoOf(KvCacheMode format) {
  for (const KvFormatInfo& row : kKvFormats) {
    if (row.format == format && !row.device_chooses) {
      return row;
    }
  }
  __builtin_unreachable();
}

// Every format once, in the order of the table.
inline constexpr auto kAllKvCacheModes = [] {
  constexpr size_t kCount = [] {
    size_t count = 0;
    for (const KvFormatInfo& row : kKvFormats) {
      count += !row.device_chooses;
    }
    return count;
  }();
  std::array<KvCacheMode, kCount> formats = {};
  size_t i = 0;
  for (const KvFormatInfo& row : kKvFormats) {
    if (!row.device_chooses) {
      formats[i++] = row.format;
    }
  }
  return formats;
}();

// Returns the row that a user's text names: a name, an alias or a number of quant_policy, in any
// case, with or without spaces around it. Throws InvalidArgument for any other text. The message
// names the text and the alternatives.
const KvFormatInfo& ParseKvFormat(std::string_view text);
const KvFormatInfo& ParseKvFormat(int quant_policy);

// Throws InvalidArgument for a quant_policy that is no such text. `shown` describes it.
[[noreturn]] void RefuseQuantPolicy(const std::string& shown);

// Resolves a quant policy on a device. Throws InvalidArgument for a value other than 0, 4, 8 and
// 16, or if the device lacks FP4 support. The message names the value and the alternatives.
KvCacheMode GetKvCacheMode(int quant_policy, const DeviceCapability& device);

// Resolves the name of a format, as ParseKvFormat reads it, on a device. With `strict_arch`, NVFP4
// is rejected on CUDA devices below SM 100.
KvCacheMode GetKvCacheMode(std::string_view name, const DeviceCapability& device,
                           bool strict_arch = false);

// Returns how a device converts a format. "not needed" means 16 bit, and "hardware" that the device
// has instructions for the format. "software" means that other instructions compute the same
// values. "unsupported" means that the device cannot use the format.
const char* KvCacheConversion(KvCacheMode format, const DeviceCapability& device);

// Returns whether the window of recent blocks can have the format (kv/precision_window.h).
TM_HD constexpr bool IsWindowFormat(KvCacheMode format) {
  return format == KvCacheMode::kNone || format == KvCacheMode::kInt8;
}

// Returns whether codes are E2M1 with a scale byte per group, as those that fp4 stands for.
TM_HD constexpr bool IsFp4(KvCacheMode format) {
  return format == KvCacheMode::kFp4Mx || format == KvCacheMode::kFp4Nv;
}

// Returns the canonical name.
constexpr const char* ToString(KvCacheMode format) { return InfoOf(format).name; }

// Returns whether the format uses a constant FP32 scale per layer, KV head and side (global_scale,
// k_scale or v_scale).
constexpr bool HasGlobalScale(KvCacheMode format) { return InfoOf(format).has_global_scale; }

// Returns whether a layer may store K and V in these formats: one format for both, or a pair that
// the table allows.
constexpr bool IsListedPair(KvCacheMode k, KvCacheMode v) {
  return k == v || (InfoOf(k).pairs_as_k && InfoOf(v).pairs_as_v);
}

// Throws InvalidArgument for a pair that is not listed.
void RequireListedPair(KvCacheMode k, KvCacheMode v);

// Returns whether a layer with latents may store the rotary part of its keys and the latents in
// these formats. The rotary part has at least 8 bits: it is an eighth of the row, and RoPE leaves
// it no common direction.
constexpr bool IsLatentPair(KvCacheMode rotary, KvCacheMode /*latent*/) {
  return InfoOf(rotary).bits >= 8;
}

// Throws InvalidArgument for a pair that IsLatentPair rejects.
void RequireLatentPair(KvCacheMode rotary, KvCacheMode latent);

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
