#include "turbomind/kv/kv_cache_mode.h"

#include <algorithm>
#include <string>

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

// Calls fn(name) for the canonical name of a row and for its aliases.
template <class F>
constexpr void ForEachName(const KvFormatInfo& row, F fn) {
  fn(row.name);
  for (const char* alias : row.aliases) {
    if (alias != nullptr) {
      fn(alias);
    }
  }
}

const KvFormatInfo* FindName(std::string_view name) {
  const KvFormatInfo* found = nullptr;
  for (const KvFormatInfo& row : kKvFormats) {
    ForEachName(row, [&](const char* candidate) { found = name == candidate ? &row : found; });
  }
  return found;
}

const KvFormatInfo* FindPolicy(int quant_policy) {
  for (const KvFormatInfo& row : kKvFormats) {
    if (row.quant_policy >= 0 && row.quant_policy == quant_policy) {
      return &row;
    }
  }
  return nullptr;
}

// Returns "0 (none), 4 (int4), ... or one of the names none, auto, ...".
std::string Alternatives() {
  std::string numbers;
  std::string names;
  for (int policy = 0; policy <= static_cast<int>(QuantPolicy::kCacheKVFp4); ++policy) {
    if (const KvFormatInfo* row = FindPolicy(policy)) {
      numbers += (numbers.empty() ? "" : ", ") + std::to_string(policy) + " (" + row->name + ")";
    }
  }
  for (const KvFormatInfo& row : kKvFormats) {
    ForEachName(
        row, [&](const char* name) { names += (names.empty() ? "" : ", ") + std::string(name); });
  }
  return numbers + " or one of the names " + names;
}

std::string_view Strip(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\n\r\f\v";
  const size_t first = text.find_first_not_of(kSpaces);
  return first == text.npos ? "" : text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

KvCacheMode Resolve(const KvFormatInfo& row, const std::string& asked,
                    const DeviceCapability& device, bool strict_arch) {
  if (row.device_chooses) {
    return ResolveFp4(asked, device);
  }
  if (row.group > 0) {
    RequireFp4(asked, device);
  }
  if (strict_arch && row.format == KvCacheMode::kFp4Nv && device.is_cuda &&
      !HasNativeNvFp4(device)) {
    throw InvalidArgument("quant_policy " + asked +
                          " with strict_arch=True needs SM 100 or higher, but the device is " +
                          DeviceText(device) + ". Use mxfp4 or strict_arch=False.");
  }
  return row.format;
}

}  // namespace

const KvFormatInfo& ParseKvFormat(int quant_policy) {
  if (const KvFormatInfo* row = FindPolicy(quant_policy)) {
    return *row;
  }
  throw InvalidArgument("quant_policy " + std::to_string(quant_policy) +
                        (quant_policy == 12 ? " (int4 and int8 together)" : "") +
                        " is not supported. Use " + Alternatives());
}

const KvFormatInfo& ParseKvFormat(std::string_view text) {
  std::string name(Strip(text).substr(0, 64));
  for (char& c : name) {
    c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  const bool is_number =
      !name.empty() && name.size() < 4 &&
      std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (is_number) {
    return ParseKvFormat(std::stoi(name));
  }
  if (const KvFormatInfo* row = FindName(name)) {
    return *row;
  }
  for (char& c : name) {  // one printable line, whatever the user typed
    c = c >= ' ' && c <= '~' ? c : '?';
  }
  throw InvalidArgument("quant_policy \"" + name + "\" is not supported. Use " + Alternatives());
}

KvCacheMode GetKvCacheMode(int quant_policy, const DeviceCapability& device) {
  const KvFormatInfo& row = ParseKvFormat(quant_policy);
  return Resolve(row, std::to_string(quant_policy) + " (" + row.name + ")", device, false);
}

KvCacheMode GetKvCacheMode(std::string_view name, const DeviceCapability& device,
                           bool strict_arch) {
  const KvFormatInfo& row = ParseKvFormat(name);
  return Resolve(row, row.name, device, strict_arch);
}

const char* KvCacheConversion(KvCacheMode format, const DeviceCapability& device) {
  constexpr int kMinSm = 80;
  if (device.is_cuda && device.sm < kMinSm) {
    return "unsupported";
  }
  if (format == KvCacheMode::kNone) {
    return "not needed";
  }
  const int first_sm = InfoOf(format).hardware_sm;
  return device.is_cuda && first_sm > 0 && device.sm >= first_sm ? "hardware" : "software";
}

void RequireListedPair(KvCacheMode k, KvCacheMode v) {
  if (!IsListedPair(k, v)) {
    throw InvalidArgument(std::string("A layer cannot combine KV format ") + ToString(k) +
                          " for K with " + ToString(v) +
                          " for V. Change kv_cache_format: use one format for both, or none, "
                          "int8 or fp8 for K with int4, mxfp4 or nvfp4 for V.");
  }
}

}  // namespace turbomind
