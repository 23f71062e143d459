#include "turbomind/kv/kv_cache_mode.h"

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

std::string DeviceText(const DeviceCapability& device) {
  return device.is_cuda ? "a CUDA device of SM " + std::to_string(device.sm) : "the CPU";
}

bool HasFp4(const DeviceCapability& device) { return !device.is_cuda || device.sm >= 80; }

// Covers the devices in docs/kv_cache.md, "Formats". A newer device is assumed to have at least the
// instructions of SM 100.
bool HasNativeNvFp4(const DeviceCapability& device) { return device.is_cuda && device.sm >= 100; }

void RequireFp4(const std::string& asked, const DeviceCapability& device) {
  if (!HasFp4(device)) {
    throw InvalidArgument(
        "quant_policy " + asked + " needs a CUDA device of SM 80 or higher, but the device is " +
        DeviceText(device) +
        ". No quant_policy works there; use device cpu, which supports all of them.");
  }
}

KvCacheMode ResolveFp4(const std::string& asked, const DeviceCapability& device) {
  RequireFp4(asked, device);
  return !device.is_cuda || HasNativeNvFp4(device) ? KvCacheMode::kFp4Nv : KvCacheMode::kFp4Mx;
}

constexpr const char* kNames = "none, int8, int4, fp8, fp8_e4m3, fp8_e5m2, fp4, mxfp4, nvfp4";

}  // namespace

KvCacheMode GetKvCacheMode(int quant_policy, const DeviceCapability& device) {
  switch (quant_policy) {
    case static_cast<int>(QuantPolicy::kNone):
      return KvCacheMode::kNone;
    case static_cast<int>(QuantPolicy::kCacheKVInt4):
      return KvCacheMode::kInt4;
    case static_cast<int>(QuantPolicy::kCacheKVInt8):
      return KvCacheMode::kInt8;
    case static_cast<int>(QuantPolicy::kCacheKVFp4):
      return ResolveFp4("16 (fp4)", device);
    default:
      break;
  }
  throw InvalidArgument(
      "quant_policy " + std::to_string(quant_policy) +
      (quant_policy == 12 ? " (int4 and int8 together)" : "") +
      " is not supported. Use 0 (none), 4 (int4), 8 (int8), 16 (fp4) or one of the names " +
      kNames);
}

KvCacheMode GetKvCacheMode(std::string_view name, const DeviceCapability& device,
                           bool strict_arch) {
  const std::string asked(name);
  KvCacheMode format = KvCacheMode::kNone;
  if (asked == "fp4") {
    format = ResolveFp4(asked, device);
  } else if (asked == "fp8_e4m3") {
    format = KvCacheMode::kFp8E4m3;
  } else {
    bool found = false;
    for (const KvCacheMode candidate : kAllKvCacheModes) {
      if (asked == ToString(candidate)) {
        format = candidate;
        found = true;
      }
    }
    if (!found) {
      throw InvalidArgument("quant_policy \"" + asked.substr(0, 64) +
                            "\" is not supported. Use 0, 4, 8, 16 or one of the names " + kNames);
    }
  }
  if (format == KvCacheMode::kFp4Mx || format == KvCacheMode::kFp4Nv) {
    RequireFp4(asked, device);
  }
  if (strict_arch && format == KvCacheMode::kFp4Nv && device.is_cuda && !HasNativeNvFp4(device)) {
    throw InvalidArgument("quant_policy " + asked +
                          " with strict_arch=True needs SM 100 or higher, but the device is " +
                          DeviceText(device) + ". Use mxfp4 or strict_arch=False.");
  }
  return format;
}

const char* KvCacheConversion(KvCacheMode format, const DeviceCapability& device) {
  constexpr int kMinSm = 80;
  constexpr int kMinFp8Sm = 89;
  if (device.is_cuda && device.sm < kMinSm) {
    return "unsupported";
  }
  bool in_hardware = false;
  switch (format) {
    case KvCacheMode::kNone:
      return "not needed";
    case KvCacheMode::kInt8:
    case KvCacheMode::kInt4:
      break;
    case KvCacheMode::kFp8E4m3:
    case KvCacheMode::kFp8E5m2:
      in_hardware = device.is_cuda && device.sm >= kMinFp8Sm;
      break;
    case KvCacheMode::kFp4Mx:
    case KvCacheMode::kFp4Nv:
      in_hardware = HasNativeNvFp4(device);
      break;
  }
  return in_hardware ? "hardware" : "software";
}

void RequireListedPair(KvCacheMode k, KvCacheMode v) {
  if (!IsListedPair(k, v)) {
    throw InvalidArgument(std::string("A layer cannot combine KV format ") + ToString(k) +
                          " for K with " + ToString(v) +
                          " for V. Change kv_cache_format: use one format for both, or none, "
                          "int8 or fp8 for K with int4, mxfp4 or nvfp4 for V.");
  }
}

const char* ToString(KvCacheMode format) {
  switch (format) {
    case KvCacheMode::kNone:
      return "none";
    case KvCacheMode::kInt8:
      return "int8";
    case KvCacheMode::kInt4:
      return "int4";
    case KvCacheMode::kFp8E4m3:
      return "fp8";
    case KvCacheMode::kFp8E5m2:
      return "fp8_e5m2";
    case KvCacheMode::kFp4Mx:
      return "mxfp4";
    case KvCacheMode::kFp4Nv:
      return "nvfp4";
  }
  return "?";
}

std::vector<std::pair<std::string, std::string>> KvCacheModeNames() {
  return {
      {"none", "the model's 16-bit dtype"},
      {"int8", "8-bit integers, a scale and a zero per token and head"},
      {"int4", "4-bit integers, a scale and a zero per token and head"},
      {"fp8", "8-bit floats (E4M3), one k_scale and v_scale per layer and head"},
      {"fp8_e4m3", "the same as fp8"},
      {"fp8_e5m2", "8-bit floats (E5M2), one k_scale and v_scale per layer and head"},
      {"fp4", "nvfp4 or mxfp4, depending on the device"},
      {"mxfp4", "4-bit floats (E2M1), a power-of-two scale per 16 values"},
      {"nvfp4", "4-bit floats (E2M1), an E4M3 scale per 16 values"},
  };
}

}  // namespace turbomind
