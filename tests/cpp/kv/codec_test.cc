#include "turbomind/kv/codec.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace turbomind {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DataType kDtypes[] = {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16};

// An encoded row. The buffers are longer than the row and filled with a sentinel, so that tests can
// check that the codec writes no byte too many.
struct Encoded {
  std::vector<uint8_t> payload = std::vector<uint8_t>(1024, 0xAB);
  std::vector<uint8_t> meta = std::vector<uint8_t>(64, 0xAB);
  int nonfinite = 0;
};

template <KvCacheMode M, bool kSearch = false>
Encoded Encode(const std::vector<float>& x, DataType dtype = DataType::kFloat32,
               float global_scale = 1.f) {
  Encoded row;
  row.nonfinite =
      Codec<M>::template EncodeRow<kSearch>(x.data(), static_cast<int>(x.size()), dtype,
                                            global_scale, row.payload.data(), row.meta.data());
  return row;
}

template <KvCacheMode M>
std::vector<float> Decode(const Encoded& row, size_t n, DataType dtype = DataType::kFloat32,
                          float global_scale = 1.f) {
  std::vector<float> out(n + 8, -12345.f);
  Codec<M>::DecodeRow(row.payload.data(), row.meta.data(), static_cast<int>(n), dtype, global_scale,
                      out.data());
  for (size_t i = n; i < out.size(); ++i) {
    CHECK(out[i] == -12345.f);
  }
  out.resize(n);
  return out;
}

bool SameBits(float a, float b) { return FloatBits(a) == FloatBits(b); }

std::vector<float> Group(float first, float amax) {
  std::vector<float> x(16, 0.f);
  x[0] = first;
  x[15] = amax;
  return x;
}

// Checks an encoder against its decoder at every code and around every midpoint of two codes.
template <class Encoder, class Decoder>
void CheckRounding(int num_codes, const Encoder& encode, const Decoder& decode) {
  for (int code = 0; code < num_codes; ++code) {
    const float value = decode(code);
    REQUIRE(encode(value) == code);
    if (code + 1 == num_codes) {
      continue;
    }
    const auto middle = static_cast<float>(
        (static_cast<double>(value) + static_cast<double>(decode(code + 1))) / 2);
    REQUIRE(encode(middle) == code + (code & 1));
    REQUIRE(encode(std::nextafter(middle, 0.f)) == code);
    REQUIRE(encode(std::nextafter(middle, kInf)) == code + 1);
  }
}

double Minifloat(int code, int mantissa_bits, int bias) {
  const int exponent = code >> mantissa_bits;
  const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
  return exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
}

TEST_CASE("every code of every small float decodes to its value") {
  const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    CHECK(E2M1ToFloat(static_cast<uint8_t>(code)) == e2m1[code]);
    CHECK(SameBits(E2M1ToFloat(static_cast<uint8_t>(code | 8)), -static_cast<float>(e2m1[code])));
  }
  for (int code = 0; code < 0x7F; ++code) {
    CHECK(E4M3ToFloat(static_cast<uint8_t>(code)) == Minifloat(code, 3, 7));
    CHECK(SameBits(E4M3ToFloat(static_cast<uint8_t>(code | 0x80)),
                   -static_cast<float>(Minifloat(code, 3, 7))));
  }
  CHECK(std::isnan(E4M3ToFloat(0x7F)));
  CHECK(std::isnan(E4M3ToFloat(0xFF)));
  for (int code = 0; code < 0x7C; ++code) {
    CHECK(E5M2ToFloat(static_cast<uint8_t>(code)) == Minifloat(code, 2, 15));
  }
  CHECK(E5M2ToFloat(0x7C) == kInf);
  CHECK(E5M2ToFloat(0xFC) == -kInf);
  for (int code = 0x7D; code < 0x80; ++code) {
    CHECK(std::isnan(E5M2ToFloat(static_cast<uint8_t>(code))));
  }
  for (int code = 0; code < 0x7C00; ++code) {
    REQUIRE(HalfToFloat(static_cast<uint16_t>(code)) == Minifloat(code, 10, 15));
  }
  CHECK(HalfToFloat(0xFC00) == -kInf);
  CHECK(std::isnan(HalfToFloat(0x7C01)));
}

TEST_CASE("encoders round to nearest, ties to even, at every code") {
  CheckRounding(
      8, [](float x) { return FloatToE2M1(x); },
      [](int code) { return E2M1ToFloat(static_cast<uint8_t>(code)); });
  CheckRounding(
      0x7F, [](float x) { return FloatToE4M3(x); },
      [](int code) { return E4M3ToFloat(static_cast<uint8_t>(code)); });
  CheckRounding(
      0x7C, [](float x) { return FloatToE5M2(x); },
      [](int code) { return E5M2ToFloat(static_cast<uint8_t>(code)); });
  CheckRounding(
      0x7C00, [](float x) { return FloatToHalf(x); },
      [](int code) { return HalfToFloat(static_cast<uint16_t>(code)); });
  CheckRounding(
      0x7F80, [](float x) { return FloatToBFloat16(x); },
      [](int code) { return BFloat16ToFloat(static_cast<uint16_t>(code)); });
}

TEST_CASE("E2M1 encodes ties, infinities, NaN and signed zeros as listed") {
  const std::pair<float, int> cases[] = {{0.25f, 0}, {0.75f, 2},  {1.25f, 2}, {1.75f, 4},
                                         {2.5f, 4},  {3.5f, 6},   {5.f, 6},   {1e30f, 7},
                                         {kInf, 7},  {-kInf, 15}, {kNan, 7},  {-kNan, 7},
                                         {-0.f, 8},  {-0.1f, 8},  {-6.f, 15}, {0.f, 0}};
  for (const auto& [x, code] : cases) {
    CAPTURE(x);
    CHECK(FloatToE2M1(x) == code);
  }
  std::vector<float> x(16, 0.f);
  x[0] = 1.f;
  x[1] = 2.f;
  x[15] = 6.f;
  CHECK(Encode<KvCacheMode::kFp4Mx>(x).payload[0] == 0x42);
}

TEST_CASE("FP8 and 16-bit encoders handle saturation, infinities, NaN and signs") {
  CHECK(FloatToE4M3(448.f) == 0x7E);
  CHECK(FloatToE4M3(1e9f) == 0x7E);
  CHECK(FloatToE4M3(-kInf) == 0xFE);
  CHECK(FloatToE4M3(-kNan) == 0x7F);
  CHECK(FloatToE4M3(-0.f) == 0x80);
  CHECK(FloatToE4M3(1e-40f) == 0);
  CHECK(FloatToE5M2(57344.f) == 0x7B);
  CHECK(FloatToE5M2(1e9f) == 0x7B);
  CHECK(FloatToE5M2(-kInf) == 0xFB);
  CHECK(FloatToE5M2(kNan) == 0x7F);
  CHECK(FloatToHalf(65519.996f) == 0x7BFF);
  CHECK(FloatToHalf(65520.f) == 0x7C00);
  CHECK(FloatToHalf(-kInf) == 0xFC00);
  CHECK(FloatToHalf(1e-30f) == 0);
  CHECK(std::isnan(HalfToFloat(FloatToHalf(kNan))));
  CHECK(FloatToBFloat16(3.4e38f) == 0x7F80);
  CHECK(std::isnan(BFloat16ToFloat(FloatToBFloat16(BitsFloat(0x7F800001u)))));
}

template <KvCacheMode M>
void CheckDecodeAll(int num_scales, float global_scale, double (*scale_value)(int)) {
  for (int scale = 0; scale < num_scales; ++scale) {
    Encoded row;
    row.meta[0] = static_cast<uint8_t>(scale);
    for (int i = 0; i < 8; ++i) {
      row.payload[static_cast<size_t>(i)] = static_cast<uint8_t>(2 * i | ((2 * i + 1) << 4));
    }
    const std::vector<float> out = Decode<M>(row, 16, DataType::kFloat32, global_scale);
    for (int code = 0; code < 16; ++code) {
      const double value =
          E2M1ToFloat(static_cast<uint8_t>(code)) * scale_value(scale) * global_scale;
      REQUIRE(SameBits(out[static_cast<size_t>(code)], static_cast<float>(value)));
    }
  }
}

TEST_CASE("FP4 decodes every code under every scale byte") {
  CheckDecodeAll<KvCacheMode::kFp4Mx>(253, 1.f, [](int b) { return std::ldexp(1.0, b - 127); });
  const auto e4m3 = [](int b) { return Minifloat(b & 0x7F, 3, 7) * (b & 0x80 ? -1 : 1); };
  CheckDecodeAll<KvCacheMode::kFp4Nv>(0x7F, 1.f, e4m3);
  CheckDecodeAll<KvCacheMode::kFp4Nv>(0x7F, 0.0078125f, e4m3);
  Encoded row;
  row.meta[0] = 0x7F;
  row.payload[0] = 0;
  CHECK(std::isnan(Decode<KvCacheMode::kFp4Nv>(row, 16)[0]));
}

TEST_CASE("FP4 encoding a decoded row again changes no value") {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.f, 3.f);
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> x(80);
    for (float& value : x) {
      value = normal(random);
    }
    x[static_cast<size_t>(i) % 16] = 6.f * std::ldexp(1.f, i % 20 - 10);
    const Encoded once = Encode<KvCacheMode::kFp4Mx>(x);
    const Encoded twice = Encode<KvCacheMode::kFp4Mx>(Decode<KvCacheMode::kFp4Mx>(once, x.size()));
    // The bytes may differ: if a group's largest value was rounded down to 3 steps, half the scale
    // fits the second time.
    REQUIRE(Decode<KvCacheMode::kFp4Mx>(once, 80) == Decode<KvCacheMode::kFp4Mx>(twice, 80));
  }
}

TEST_CASE("MXFP4 uses the smallest exponent that does not clip") {
  for (int e = -15; e <= 9; ++e) {
    const float edge = 6.f * std::ldexp(1.f, e);
    CHECK(Encode<KvCacheMode::kFp4Mx>(Group(0.f, edge)).meta[0] == 127 + e);
    CHECK(Encode<KvCacheMode::kFp4Mx>(Group(0.f, -edge)).meta[0] == 127 + e);
    CHECK(Encode<KvCacheMode::kFp4Mx>(Group(0.f, std::nextafter(edge, 0.f))).meta[0] == 127 + e);
    CHECK(Encode<KvCacheMode::kFp4Mx>(Group(0.f, std::nextafter(edge, kInf))).meta[0] ==
          std::min(128 + e, kMxMaxByte));
  }
  CHECK(Encode<KvCacheMode::kFp4Mx>(Group(0.f, 1e-40f)).meta[0] == kMxMinByte);
  CHECK(Encode<KvCacheMode::kFp4Mx>(Group(0.f, kInf)).meta[0] == kMxMaxByte);
}

template <KvCacheMode M>
void CheckSpecialGroups(uint8_t zero_scale) {
  for (const float zero : {0.f, -0.f, kNan}) {
    const Encoded row = Encode<M, true>(std::vector<float>(16, zero));
    CHECK(row.meta[0] == zero_scale);
    CHECK(row.meta[1] == 0xAB);
    for (size_t i = 0; i < 8; ++i) {
      CHECK(row.payload[i] == 0);
    }
    CHECK(row.payload[8] == 0xAB);
    CHECK(row.nonfinite == (std::isnan(zero) ? 16 : 0));
  }
  std::vector<float> x = Group(kNan, 6.f);
  x[1] = -0.f;
  const Encoded with_nan = Encode<M>(x);
  CHECK(with_nan.payload[0] == 0x87);  // NaN → 7, −0 → 8
  CHECK(with_nan.payload[7] == 0x70);
  CHECK(with_nan.nonfinite == 1);
  CHECK(with_nan.meta[0] == Encode<M>(Group(0.f, 6.f)).meta[0]);
  const Encoded with_inf = Encode<M>(Group(-kInf, 6.f), DataType::kFloat16);
  CHECK(with_inf.payload[0] == 0x0F);
  CHECK(with_inf.nonfinite == 1);
}

TEST_CASE("FP4 encodes zero groups, NaN and infinities as specified") {
  CheckSpecialGroups<KvCacheMode::kFp4Mx>(112);
  CheckSpecialGroups<KvCacheMode::kFp4Nv>(0);
}

TEST_CASE("NVFP4 keeps scales in range and divides the payload by the stored scale") {
  CHECK(Encode<KvCacheMode::kFp4Nv>(Group(0.f, 6.f)).meta[0] == 0x38);  // 1.0
  CHECK(Encode<KvCacheMode::kFp4Nv>(Group(0.f, 6.f), DataType::kFloat32, 0.5f).meta[0] == 0x40);
  CHECK(Encode<KvCacheMode::kFp4Nv>(Group(0.f, 1e-30f)).meta[0] == 0x01);
  CHECK(Encode<KvCacheMode::kFp4Nv>(Group(0.f, 1e30f)).meta[0] == 0x7E);
  CHECK(Encode<KvCacheMode::kFp4Nv, true>(Group(0.f, 1e30f)).meta[0] == 0x7E);
  // 6.3 / 6 = 1.05 is stored as 1.0, so 5.2 is 5.2 steps (code 7) and not 4.95 (code 6).
  CHECK(Encode<KvCacheMode::kFp4Nv>(Group(5.2f, 6.3f)).payload[0] == 0x07);
}

double SquaredError(const std::vector<float>& x, const std::vector<float>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    sum += (static_cast<double>(x[i]) - y[i]) * (static_cast<double>(x[i]) - y[i]);
  }
  return sum;
}

TEST_CASE("the scale search never has a larger error than the plain rule") {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 3000; ++i) {
    std::vector<float> x(16);
    for (float& value : x) {
      value = normal(random);
    }
    const auto error = [&]<KvCacheMode M, bool kSearch>() {
      return SquaredError(x, Decode<M>(Encode<M, kSearch>(x), 16));
    };
    constexpr KvCacheMode kMx = KvCacheMode::kFp4Mx;
    constexpr KvCacheMode kNv = KvCacheMode::kFp4Nv;
    // The search compares FP32 sums, so their rounding can make it choose a slightly worse scale.
    constexpr double kRounding = 1.00001;
    REQUIRE(error.operator()<kMx, true>() <= error.operator()<kMx, false>() * kRounding);
    REQUIRE(error.operator()<kNv, true>() <= error.operator()<kNv, false>() * kRounding);
  }
}

TEST_CASE("integers keep the ends of a row, use scale 0 for constants and stay finite") {
  for (const DataType dtype : kDtypes) {
    const std::vector<float> ramp = {-1.f, 0.f, 1.f, 2.f, 5.f, 6.f, 14.f, 13.5f};
    const Encoded row = Encode<KvCacheMode::kInt4>(ramp, dtype);
    CHECK(LoadAs(row.meta.data(), dtype, 0) == 1.f);
    CHECK(LoadAs(row.meta.data(), dtype, 1) == -1.f);
    CHECK(row.payload[0] == 0x10);
    CHECK(row.payload[3] == 0xEF);  // 14.5 steps: the tie rounds to the even code 14
    CHECK(row.payload[4] == 0xAB);
    CHECK(row.meta[static_cast<size_t>(2 * SizeOf(dtype))] == 0xAB);

    const Encoded constant = Encode<KvCacheMode::kInt8>(std::vector<float>(10, 3.f), dtype);
    CHECK(LoadAs(constant.meta.data(), dtype, 0) == 0.f);
    CHECK(constant.payload[9] == 0);
    CHECK(Decode<KvCacheMode::kInt8>(constant, 10, dtype) == std::vector<float>(10, 3.f));

    const std::vector<float> bad = {kInf, -kInf, kNan, 1.f};
    const Encoded coded = Encode<KvCacheMode::kInt8>(bad, dtype);
    CHECK(coded.nonfinite == 3);
    for (const float value : Decode<KvCacheMode::kInt8>(coded, 4, dtype)) {
      CHECK(std::isfinite(value));
    }
    for (const float value :
         Decode<KvCacheMode::kInt4>(Encode<KvCacheMode::kInt4>(bad, dtype), 4, dtype)) {
      CHECK(std::isfinite(value));
    }
  }
}

TEST_CASE("integers store a minimum of -0 as +0") {
  const Encoded a = Encode<KvCacheMode::kInt8>({-0.f, 0.f, 1.f, 2.f}, DataType::kFloat16);
  const Encoded b = Encode<KvCacheMode::kInt8>({0.f, -0.f, 1.f, 2.f}, DataType::kFloat16);
  CHECK(a.meta == b.meta);
  CHECK(a.meta[3] == 0);
}

TEST_CASE("every integer code decodes to code * scale + zero") {
  for (const DataType dtype : kDtypes) {
    Encoded row;
    StoreAs(0.3f, dtype, row.meta.data(), 0);
    StoreAs(-7.f, dtype, row.meta.data(), 1);
    for (size_t i = 0; i < 256; ++i) {
      row.payload[i] = static_cast<uint8_t>(i);
    }
    const std::vector<float> out = Decode<KvCacheMode::kInt8>(row, 256, dtype);
    const std::vector<float> nibbles = Decode<KvCacheMode::kInt4>(row, 512, dtype);
    const float scale = RoundTo(0.3f, dtype);
    for (size_t i = 0; i < 256; ++i) {
      REQUIRE(out[i] == static_cast<float>(i) * scale + -7.f);
      REQUIRE(nibbles[2 * i] == static_cast<float>(i & 15) * scale + -7.f);
      REQUIRE(nibbles[2 * i + 1] == static_cast<float>(i >> 4) * scale + -7.f);
    }
  }
}

TEST_CASE("none and FP8 round-trip stored values and count nonfinite ones") {
  for (const DataType dtype : kDtypes) {
    const std::vector<float> x = {1.f, -2.5f, 1.00048828125f, kInf, kNan, -0.f};
    const Encoded row = Encode<KvCacheMode::kNone>(x, dtype);
    const std::vector<float> out = Decode<KvCacheMode::kNone>(row, x.size(), dtype);
    CHECK(row.nonfinite == 2);
    for (size_t i = 0; i < x.size(); ++i) {
      CHECK((SameBits(out[i], RoundTo(x[i], dtype)) || (std::isnan(out[i]) && std::isnan(x[i]))));
    }
  }
  const Encoded fp8 =
      Encode<KvCacheMode::kFp8E4m3>({8.f, -8.f, kInf, kNan}, DataType::kBFloat16, 2.f);
  CHECK(fp8.nonfinite == 2);
  CHECK(fp8.payload[2] == 0x7E);
  CHECK(fp8.payload[3] == 0x7F);
  CHECK(Decode<KvCacheMode::kFp8E4m3>(fp8, 2, DataType::kBFloat16, 2.f) ==
        std::vector<float>{8.f, -8.f});
  // A value that overflows the cache dtype counts as infinite.
  CHECK(Encode<KvCacheMode::kFp8E5m2>({1e5f, 1.f}, DataType::kFloat16).nonfinite == 1);
}

template <KvCacheMode M, bool kSearch = false>
double RelativeError() {
  std::mt19937 random(2024);
  std::normal_distribution<float> normal;
  double error = 0;
  double size = 0;
  std::vector<float> x(128);
  for (int row = 0; row < 4096; ++row) {
    for (float& value : x) {
      value = normal(random);
    }
    const Encoded encoded = Encode<M, kSearch>(x, DataType::kFloat16);
    error += SquaredError(x, Decode<M>(encoded, x.size(), DataType::kFloat16));
    size += SquaredError(x, std::vector<float>(x.size(), 0.f));
  }
  return std::sqrt(error / size);
}

void CheckFigure(const char* name, double measured, double expected) {
  constexpr double kBand = 0.02;
  MESSAGE(std::string(name) << ": relative L2 error " << measured << ", expected " << expected);
  CHECK(measured > expected * (1 - kBand));
  CHECK(measured < expected * (1 + kBand));
}

template <KvCacheMode M>
void CheckLimit(float wanted, float global_scale) {
  const float limit = ClipLimit(M, global_scale);
  CHECK(limit == wanted);
  const float beyond = std::nextafter(limit, kInf);
  std::vector<float> row(16, 0.f);
  row[0] = limit;
  row[1] = -beyond;
  row[2] = 1e37f;
  row[3] = kInf;
  row[4] = kNan;
  CHECK(CountClipped(row.data(), 16, DataType::kFloat32, limit) == 2);
  const std::vector<float> decoded = Decode<M>(Encode<M>(row, DataType::kFloat32, global_scale),
                                               row.size(), DataType::kFloat32, global_scale);
  CHECK(decoded[0] == limit);
  CHECK(decoded[1] == -limit);
  CHECK(decoded[2] == limit);
}

TEST_CASE("clipping: the limit of a format is its largest value") {
  CheckLimit<KvCacheMode::kFp8E4m3>(448.f, 1.f);
  CheckLimit<KvCacheMode::kFp8E4m3>(112.f, 0.25f);
  CheckLimit<KvCacheMode::kFp8E5m2>(57344.f, 1.f);
  CheckLimit<KvCacheMode::kFp4Mx>(3072.f, 1.f);
  CheckLimit<KvCacheMode::kFp4Mx>(3072.f, 0.25f);
  CheckLimit<KvCacheMode::kFp4Nv>(2688.f, 1.f);
  CheckLimit<KvCacheMode::kFp4Nv>(672.f, 0.25f);
  const float largest = LargestFinite(DataType::kFloat32);
  for (KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kInt4}) {
    CHECK(ClipLimit(format, 1.f) == largest);
  }
  CHECK(ClipLimit(KvCacheMode::kFp4Nv, 0x1p127f) == largest);
}

TEST_CASE("a round trip of N(0, 1) has the published relative error") {
  CheckFigure("nvfp4", RelativeError<KvCacheMode::kFp4Nv>(), 0.0952);
  CheckFigure("nvfp4 search", RelativeError<KvCacheMode::kFp4Nv, true>(), 0.0815);
  CheckFigure("mxfp4", RelativeError<KvCacheMode::kFp4Mx>(), 0.1129);
  CheckFigure("mxfp4 search", RelativeError<KvCacheMode::kFp4Mx, true>(), 0.1100);
  CheckFigure("int4", RelativeError<KvCacheMode::kInt4>(), 0.0999);
  CheckFigure("int8", RelativeError<KvCacheMode::kInt8>(), 0.0059);
  CheckFigure("fp8", RelativeError<KvCacheMode::kFp8E4m3>(), 0.0265);
}

}  // namespace
}  // namespace turbomind
