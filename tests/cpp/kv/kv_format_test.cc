#include "turbomind/kv/kv_format.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

const DeviceCapability kCpu = {};

DeviceCapability Cuda(int sm) { return {true, sm}; }

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

bool Mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("the table has every format and every name once") {
  std::set<KvCacheMode> formats;
  std::set<std::string> names;
  std::set<int> policies;
  for (const KvFormatInfo& row : kKvFormats) {
    CAPTURE(row.name);
    CHECK((row.device_chooses || formats.insert(row.format).second));
    CHECK(names.insert(row.name).second);
    for (const char* alias : row.aliases) {
      CHECK((alias == nullptr || names.insert(alias).second));
    }
    CHECK((row.quant_policy < 0 || policies.insert(row.quant_policy).second));
    CHECK(*row.description != '\0');
  }
  // DispatchFormat's switch has every enumerator, and layout.cc requires a row for each.
  CHECK(formats.size() == kAllKvCacheModes.size());
  CHECK(policies == std::set<int>{0, 4, 8, 16});
}

TEST_CASE("four integers name KV formats") {
  for (const DeviceCapability& device : {kCpu, Cuda(75), Cuda(90)}) {
    CHECK(GetKvCacheMode(0, device) == KvCacheMode::kNone);
    CHECK(GetKvCacheMode(4, device) == KvCacheMode::kInt4);
    CHECK(GetKvCacheMode(8, device) == KvCacheMode::kInt8);
  }
}

TEST_CASE("16 selects the FP4 format of the device") {
  CHECK(GetKvCacheMode(16, kCpu) == KvCacheMode::kFp4Nv);
  for (const int sm : {80, 86, 87, 89, 90}) {
    CHECK(GetKvCacheMode(16, Cuda(sm)) == KvCacheMode::kFp4Mx);
    CHECK(GetKvCacheMode("fp4", Cuda(sm)) == KvCacheMode::kFp4Mx);
    CHECK(GetKvCacheMode("nvfp4", Cuda(sm)) == KvCacheMode::kFp4Nv);
  }
  for (const int sm : {100, 101, 103, 110, 120, 121}) {
    CHECK(GetKvCacheMode(16, Cuda(sm)) == KvCacheMode::kFp4Nv);
    CHECK(GetKvCacheMode("mxfp4", Cuda(sm)) == KvCacheMode::kFp4Mx);
    CHECK(GetKvCacheMode("nvfp4", Cuda(sm), true) == KvCacheMode::kFp4Nv);
  }
}

TEST_CASE("a device converts a format in hardware only if it has instructions for it") {
  const std::pair<const char*, int> first_sm[] = {{"none", 0},   {"int8", 0},      {"int4", 0},
                                                  {"fp8", 89},   {"fp8_e5m2", 89}, {"mxfp4", 100},
                                                  {"nvfp4", 100}};
  for (const auto& [name, hardware_sm] : first_sm) {
    CAPTURE(name);
    const KvCacheMode format = GetKvCacheMode(name, kCpu);
    const std::string in_software = format == KvCacheMode::kNone ? "not needed" : "software";
    CHECK(KvCacheConversion(format, kCpu) == in_software);
    CHECK(KvCacheConversion(format, Cuda(75)) == std::string("unsupported"));
    for (const int sm : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
      const bool in_hardware = hardware_sm > 0 && sm >= hardware_sm;
      CHECK(KvCacheConversion(format, Cuda(sm)) == (in_hardware ? "hardware" : in_software));
    }
  }
}

TEST_CASE("the error for a device without FP4 names the device and those that support it") {
  for (const char* name : {"fp4", "mxfp4", "nvfp4"}) {
    const std::string text = ErrorOf([&] { GetKvCacheMode(name, Cuda(75)); });
    CHECK(Mentions(text, name));
    CHECK(Mentions(text, "SM 75"));
    CHECK(Mentions(text, "SM 80"));
    CHECK(Mentions(text, "Use --device cpu"));
  }
  CHECK(Mentions(ErrorOf([] { GetKvCacheMode(16, Cuda(70)); }), "SM 70"));
}

// TurboMind's clients and its design give these bits a meaning, also those that no format uses.
static_assert(static_cast<int>(QuantPolicy::kNone) == 0);
static_assert(static_cast<int>(QuantPolicy::kReserve1) == 1);
static_assert(static_cast<int>(QuantPolicy::kReserve2) == 2);
static_assert(static_cast<int>(QuantPolicy::kCacheKVInt4) == 4);
static_assert(static_cast<int>(QuantPolicy::kCacheKVInt8) == 8);
static_assert(static_cast<int>(QuantPolicy::kCacheKVFp4) == 16);

TEST_CASE("every policy selects its format by its value") {
  const auto mode_of = [](QuantPolicy policy) {
    return GetKvCacheMode(static_cast<int>(policy), kCpu);
  };
  CHECK(mode_of(QuantPolicy::kNone) == KvCacheMode::kNone);
  CHECK(mode_of(QuantPolicy::kCacheKVInt4) == KvCacheMode::kInt4);
  CHECK(mode_of(QuantPolicy::kCacheKVInt8) == KvCacheMode::kInt8);
  CHECK(mode_of(QuantPolicy::kCacheKVFp4) == KvCacheMode::kFp4Nv);
  for (const QuantPolicy reserved : {QuantPolicy::kReserve1, QuantPolicy::kReserve2}) {
    CHECK(Mentions(ErrorOf([&] { mode_of(reserved); }), "quant_policy is"));
  }
}

TEST_CASE("every other integer is rejected with its value") {
  for (int value = -40; value <= 300; ++value) {
    if (value == 0 || value == 4 || value == 8 || value == 16) {
      continue;
    }
    const std::string text = ErrorOf([&] { GetKvCacheMode(value, kCpu); });
    CHECK(Mentions(text, "quant_policy is " + std::to_string(value)));
    CHECK(Mentions(text, "0 (none), 4 (int4), 8 (int8), 16 (fp4)"));
    CHECK(Mentions(text, "nvfp4"));
    CHECK(!Mentions(text, "\n"));
  }
  CHECK(Mentions(ErrorOf([] { GetKvCacheMode(12, kCpu); }), "int4 and int8 together"));
}

TEST_CASE("every name and alias selects its format, in any case") {
  const std::string error = ErrorOf([] { GetKvCacheMode("fp3", kCpu); });
  CHECK(Mentions(error, "\"fp3\""));
  const auto check = [&](const KvFormatInfo& row, std::string name) {
    CAPTURE(name);
    CHECK(GetKvCacheMode(name, kCpu) == row.format);
    CHECK(Mentions(error, name));
    CHECK(ParseKvFormat(name).name == row.name);
    std::transform(name.begin(), name.end(), name.begin(),
                   [](char c) { return static_cast<char>(std::toupper(c)); });
    CHECK(ParseKvFormat(" " + name + "\n").name == row.name);
  };
  for (const KvFormatInfo& row : kKvFormats) {
    check(row, row.name);
    for (const char* alias : row.aliases) {
      if (alias != nullptr) {
        check(row, alias);
      }
    }
    if (row.quant_policy >= 0) {
      CHECK(ParseKvFormat(std::to_string(row.quant_policy)).name == row.name);
      CHECK(ParseKvFormat(row.quant_policy).name == row.name);
    }
  }
  for (const KvCacheMode format : kAllKvCacheModes) {
    CHECK(GetKvCacheMode(ToString(format), kCpu) == format);
  }
}

TEST_CASE("every other text is refused in one printable line") {
  const std::string long_text(5000, 'x');
  for (const std::string& bad :
       {std::string(), std::string(" "), std::string("5"), std::string("-1"), std::string("0016"),
        std::string("16x"), std::string("nvfp4\nfp8"), std::string("fp8\0", 4),
        std::string("\xff\xfe"), std::string("nv fp4"), long_text}) {
    const std::string text = ErrorOf([&] { ParseKvFormat(bad); });
    CHECK(text.starts_with("quant_policy is "));
    CHECK(text.ends_with(" (--quant-policy)."));
    CHECK(text.size() < 400);
    for (const char c : text) {
      CHECK((c >= ' ' && c <= '~'));
    }
  }
}

TEST_CASE("strict_arch rejects NVFP4 on CUDA devices only") {
  CHECK(GetKvCacheMode("nvfp4", kCpu, true) == KvCacheMode::kFp4Nv);
  CHECK(GetKvCacheMode("mxfp4", Cuda(90), true) == KvCacheMode::kFp4Mx);
  const std::string text = ErrorOf([] { GetKvCacheMode("nvfp4", Cuda(90), true); });
  CHECK(Mentions(text, "strict_arch"));
  CHECK(Mentions(text, "SM 90"));
  CHECK(Mentions(text, "mxfp4"));
}

}  // namespace
}  // namespace turbomind
