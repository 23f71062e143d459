#include "turbomind/kv/kv_format.h"

#include <algorithm>
#include <string>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr int kMinSm = 80;  // of the CUDA backend

bool IsTooOld(const DeviceCapability& device) { return device.is_cuda && device.sm < kMinSm; }

// Covers the devices in docs/kv_cache.md, "Formats". A newer device is assumed to have at least the
// instructions of the first one that has them.
bool HasInstructions(KvCacheMode format, const DeviceCapability& device) {
  const int first_sm = InfoOf(format).hardware_sm;
  return device.is_cuda && first_sm > 0 && device.sm >= first_sm;
}

// Throws InvalidArgument for a CUDA device. `what` is what needs an architecture from `min_sm` on.
[[noreturn]] void RefuseDevice(const DeviceCapability& device, int min_sm, const std::string& what,
                               const std::string& advice) {
  throw InvalidArgument("The CUDA device is SM " + std::to_string(device.sm) + ". It must be SM " +
                        std::to_string(min_sm) + " or higher for quant_policy " + what + ". " +
                        advice);
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
  if (IsFp4(row.format) && IsTooOld(device)) {
    RefuseDevice(device, kMinSm, asked, "Use --device cpu, which supports every quant_policy.");
  }
  const bool slow_nvfp4 = device.is_cuda && !HasInstructions(KvCacheMode::kFp4Nv, device);
  if (row.device_chooses) {
    return slow_nvfp4 ? KvCacheMode::kFp4Mx : KvCacheMode::kFp4Nv;
  }
  if (strict_arch && row.format == KvCacheMode::kFp4Nv && slow_nvfp4) {
    RefuseDevice(device, InfoOf(row.format).hardware_sm, asked + " with strict_arch=True",
                 "Use mxfp4 or strict_arch=False.");
  }
  return row.format;
}

// Returns "a, b or c": the names of the formats whose row has `member`.
std::string NamesWith(bool KvFormatInfo::*member) {
  std::vector<std::string> names;
  for (const KvCacheMode format : kAllKvCacheModes) {
    if (InfoOf(format).*member) {
      names.emplace_back(ToString(format));
    }
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
  }
  return text;
}

}  // namespace

void RefuseQuantPolicy(const std::string& shown) {
  throw InvalidArgument("quant_policy",
                        "is " + shown + ". It must be " + Alternatives() + " (--quant-policy).");
}

const KvFormatInfo& ParseKvFormat(int quant_policy) {
  if (const KvFormatInfo* row = FindPolicy(quant_policy)) {
    return *row;
  }
  RefuseQuantPolicy(std::to_string(quant_policy) +
                    (quant_policy == 12 ? " (int4 and int8 together)" : ""));
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
  RefuseQuantPolicy('"' + name + '"');
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
  if (IsTooOld(device)) {
    return "unsupported";
  }
  if (format == KvCacheMode::kNone) {
    return "not needed";
  }
  return HasInstructions(format, device) ? "hardware" : "software";
}

void RequireListedPair(KvCacheMode k, KvCacheMode v) {
  if (!IsListedPair(k, v)) {
    throw InvalidArgument("kv_cache_format",
                          std::string("is k=") + ToString(k) + ",v=" + ToString(v) +
                              ". It must be one format for both, or " +
                              NamesWith(&KvFormatInfo::pairs_as_k) + " for K with " +
                              NamesWith(&KvFormatInfo::pairs_as_v) + " for V.");
  }
}

void RequireLatentPair(KvCacheMode rotary, KvCacheMode latent) {
  if (!IsLatentPair(rotary, latent)) {
    throw InvalidArgument(
        "kv_cache_format",
        std::string("is k=") + ToString(rotary) + ",v=" + ToString(latent) +
            ". In a model with latents, K is the rotary part, which needs 8 or 16 "
            "bits. Use none or int8 for K.");
  }
}

}  // namespace turbomind
