#include <doctest/doctest.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu_shim/tile_registers.h"
#include "turbomind/backend/cpu/cpu_isa.h"

namespace turbomind {
namespace {

template <class T>
cpu_shim::Lanes<T> RandomLanes(uint32_t seed) {
  std::mt19937 random(seed);
  cpu_shim::Lanes<T> lanes;
  for (T& lane : lanes.of) {
    lane = static_cast<T>(random());
  }
  return lanes;
}

template <class T>
__m512i Register(const cpu_shim::Lanes<T>& lanes) {
  return __builtin_bit_cast(__m512i, lanes);
}

float Dot(float sum, float a1, float b1, float a0, float b0) {
  const auto bf16 = [](float low, float high) {
    return static_cast<int32_t>(std::bit_cast<uint32_t>(low) >> 16 |
                                (std::bit_cast<uint32_t>(high) & 0xffff0000u));
  };
  return _mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_set1_ps(sum),
                                           (__m512bh)_mm512_set1_epi32(bf16(a0, a1)),
                                           (__m512bh)_mm512_set1_epi32(bf16(b0, b1))));
}

constexpr float kTiny = 0x1p-130f;  // a subnormal number

}  // namespace

TEST_CASE("the stand-in offers every instruction set") {
  CHECK(AvailableCpuIsas() == std::vector<std::string>{"scalar", "avx2", "avx512", "amx"});
}

TEST_CASE("products of bytes and of int16 are exact and do not saturate") {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    auto a = RandomLanes<uint8_t>(seed);
    auto b = RandomLanes<int8_t>(seed + 100);
    if (seed == 0) {
      std::fill(std::begin(a.of), std::end(a.of), 255);
      std::fill(std::begin(b.of), std::end(b.of), -128);
    }
    const auto sum = RandomLanes<int32_t>(seed + 200);
    const auto bytes =
        cpu_shim::Split<int32_t>(_mm512_dpbusd_epi32(Register(sum), Register(a), Register(b)));
    const auto x = cpu_shim::Split<int16_t>(a);
    const auto y = cpu_shim::Split<int16_t>(b);
    const auto words =
        cpu_shim::Split<int32_t>(_mm512_dpwssd_epi32(Register(sum), Register(a), Register(b)));
    for (int i = 0; i < 16; ++i) {
      int64_t want = sum.of[i];
      for (int k = 4 * i; k < 4 * i + 4; ++k) {
        want += a.of[k] * b.of[k];
      }
      CHECK(bytes.of[i] == static_cast<int32_t>(want));
      want = sum.of[i] + int64_t{x.of[2 * i]} * y.of[2 * i] +
             int64_t{x.of[2 * i + 1]} * y.of[2 * i + 1];
      CHECK(words.of[i] == static_cast<int32_t>(want));
    }
  }
}

TEST_CASE("a product of BF16 adds the odd numbers first and replaces subnormal numbers by zero") {
  CHECK(Dot(1.f, 2.f, 3.f, 4.f, 5.f) == 27.f);
  CHECK(Dot(0x1p24f, 1.f, 1.f, 1.f, 1.f) == 0x1p24f);   // each addition rounds to even
  CHECK(Dot(-0x1p24f, 0x1p24f, 1.f, 1.f, 1.f) == 1.f);  // the odd product cancels the sum first
  CHECK(Dot(1.f, 1.f, 1.f, -0x1p60f, 1.f) == -0x1p60f);
  CHECK(Dot(kTiny, 0.f, 1.f, 0.f, 1.f) == 0.f);
  CHECK(Dot(0.f, kTiny, 0x1p100f, 0.f, 1.f) == 0.f);
  CHECK(Dot(0.f, 0x1p-70f, 0x1p-70f, 0.f, 1.f) == 0.f);
  CHECK(std::isnan(Dot(0.f, std::numeric_limits<float>::infinity(), 0.f, 0.f, 0.f)));
}

TEST_CASE("conversions return what hardware returns for numbers out of range") {
  const float values[] = {2.5f, -2.5f, 3e9f, -3e9f, std::numeric_limits<float>::quiet_NaN(), 0.5f};
  const int32_t rounded[] = {2, -2, INT32_MIN, INT32_MIN, INT32_MIN, 0};
  for (size_t i = 0; i < std::size(values); ++i) {
    const __m512i got = _mm512_cvtps_epi32(_mm512_set1_ps(values[i]));
    CHECK(cpu_shim::Split<int32_t>(got).of[15] == rounded[i]);
  }
  const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
  CHECK(_mm512_cvtss_f32(_mm512_max_ps(nan, _mm512_set1_ps(1.f))) == 1.f);
  CHECK(std::isnan(_mm512_cvtss_f32(_mm512_max_ps(_mm512_set1_ps(1.f), nan))));
}

TEST_CASE("a conversion to BF16 rounds to nearest even and keeps NaN and infinities") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto rounded = [](float x) {
    const auto lanes = cpu_shim::Split<uint16_t>(
        (__m512i)_mm512_cvtne2ps_pbh(_mm512_set1_ps(x), _mm512_set1_ps(1.f)));
    CHECK(lanes.of[15] == 0x3f80);
    return int{lanes.of[16]};
  };
  CHECK(rounded(-2.f) == 0xc000);
  CHECK(rounded(0x1.01p0f) == 0x3f80);        // a tie: the even neighbor is below
  CHECK(rounded(0x1.03p0f) == 0x3f82);        // a tie: the even neighbor is above
  CHECK(rounded(0x1.010002p0f) == 0x3f81);    // just above a tie
  CHECK(rounded(0x1.fffffep127f) == 0x7f80);  // the largest number becomes infinite
  CHECK(rounded(-kInf) == 0xff80);
  CHECK(rounded(std::bit_cast<float>(0xff800001u)) == 0xffc0);  // a signaling NaN becomes quiet
  CHECK(rounded(-kTiny) == 0x8000);
  CHECK(rounded(0x1.fffffcp-127f) == 0);  // the largest subnormal number
}

TEST_CASE("indexes of permutations use as many bits as there are lanes") {
  const auto table = RandomLanes<uint8_t>(1);
  const auto other = RandomLanes<uint8_t>(2);
  const auto index = RandomLanes<uint8_t>(3);
  const auto one =
      cpu_shim::Split<uint8_t>(_mm512_permutexvar_epi8(Register(index), Register(table)));
  const auto two = cpu_shim::Split<uint8_t>(
      _mm512_permutex2var_epi8(Register(table), Register(index), Register(other)));
  for (int i = 0; i < 64; ++i) {
    const int at = index.of[i];
    CHECK(one.of[i] == table.of[at % 64]);
    CHECK(two.of[i] == (at % 128 < 64 ? table.of[at % 64] : other.of[at % 64]));
  }
}

TEST_CASE("a shift of unaligned bytes wraps around the qword") {
  const __m512i qword = _mm512_set1_epi64(0x0123456789abcdef);
  const auto at = [&](int bit) {
    const auto lanes =
        cpu_shim::Split<uint8_t>(_mm512_multishift_epi64_epi8(_mm512_set1_epi8(bit), qword));
    return int{lanes.of[63]};
  };
  CHECK(at(0) == 0xef);
  CHECK(at(4) == 0xde);
  CHECK(at(60) == 0xf0);
  CHECK(at(64) == 0xef);
}

TEST_CASE("ternary logic looks up every bit") {
  const __m512i a = _mm512_set1_epi32(0xf0);
  const __m512i b = _mm512_set1_epi32(0xcc);
  const __m512i c = _mm512_set1_epi32(0xaa);
  for (int table = 0; table < 256; ++table) {
    const auto lanes = cpu_shim::Split<uint8_t>(_mm512_ternarylogic_epi32(a, b, c, table));
    CHECK(lanes.of[4] == table);
  }
}

TEST_CASE(
    "the fraction of a number and its product with a power of two are what hardware returns") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto fraction = [](float x) {
    return _mm512_cvtss_f32(
        _mm512_reduce_ps(_mm512_set1_ps(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  };
  CHECK(fraction(2.75f) == 0.75f);
  CHECK(fraction(-2.75f) == 0.25f);
  CHECK(fraction(-0x1p-60f) == 1.f);  // rounded
  CHECK(fraction(-kInf) == 0.f);
  CHECK(std::isnan(fraction(std::numeric_limits<float>::quiet_NaN())));
  const auto scaled = [](float x, float exponent) {
    return _mm512_cvtss_f32(_mm512_scalef_ps(_mm512_set1_ps(x), _mm512_set1_ps(exponent)));
  };
  CHECK(scaled(1.5f, 2.9f) == 6.f);
  CHECK(scaled(1.5f, -2.1f) == 0.1875f);
  CHECK(scaled(1.f, -130.f) == kTiny);
  CHECK(scaled(1.f, -1e30f) == 0.f);
  CHECK(scaled(-1.f, kInf) == -kInf);
  CHECK(scaled(1.f, -kInf) == 0.f);
  CHECK(std::isnan(scaled(0.f, kInf)));
  CHECK(std::isnan(scaled(kInf, -kInf)));
  CHECK(std::isnan(scaled(1.f, std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("masked lanes are neither read nor written") {
  constexpr size_t kPage = 4096;
  auto* memory = static_cast<char*>(
      mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(mprotect(memory + kPage, kPage, PROT_NONE) == 0);
  char* last = memory + kPage - 12;
  std::memset(last, 7, 12);
  const auto bytes = cpu_shim::Split<uint8_t>(_mm512_maskz_loadu_epi8(0xfff, last));
  CHECK(bytes.of[11] == 7);
  CHECK(bytes.of[12] == 0);
  _mm512_mask_storeu_ps(last, 7, _mm512_maskz_loadu_ps(7, last));
  CHECK(last[0] == 7);
  munmap(memory, 2 * kPage);
}

namespace {

// Returns a configuration of tiles 0 to 2 for the product of [2, 8 bytes] and [8 bytes, 3 dwords].
std::vector<uint8_t> SmallTiles() {
  std::vector<uint8_t> config(64);
  config[0] = 1;
  const int rows[] = {2, 2, 2};
  const int bytes[] = {12, 8, 12};
  for (size_t i = 0; i < 3; ++i) {
    config[16 + 2 * i] = static_cast<uint8_t>(bytes[i]);
    config[48 + i] = static_cast<uint8_t>(rows[i]);
  }
  return config;
}

template <class A>
void CheckTileProduct(void (*dot)(cpu_shim::TileProduct)) {
  const auto a = RandomLanes<A>(5);
  const auto b = RandomLanes<int8_t>(6);
  auto c = RandomLanes<uint32_t>(7);
  const auto before = c;
  cpu_shim::LoadTileConfig(SmallTiles().data());
  cpu_shim::LoadTile(0, c.of, 20);
  cpu_shim::LoadTile(1, a.of, 32);
  cpu_shim::LoadTile(2, b.of, 16);
  dot({0, 1, 2});
  cpu_shim::StoreTile(0, c.of, 20);
  cpu_shim::ReleaseTiles();
  for (int m = 0; m < 2; ++m) {
    for (int n = 0; n < 5; ++n) {
      uint32_t want = before.of[5 * m + n];
      for (int k = 0; n < 3 && k < 8; ++k) {
        want += static_cast<uint32_t>(a.of[32 * m + k] * b.of[16 * (k / 4) + 4 * n + k % 4]);
      }
      CHECK(c.of[5 * m + n] == want);  // the dwords between the rows stay
    }
  }
}

}  // namespace

TEST_CASE("products of tiles of bytes are exact within the configured shapes") {
  CheckTileProduct<int8_t>(cpu_shim::DotBytes);
  CheckTileProduct<uint8_t>(cpu_shim::DotUnsigned);
}

TEST_CASE("a product of BF16 tiles sums even and odd columns apart") {
  // a · b = 2^24 + 1 + (-2^24) + 1: the odd columns, 1 and 1, add up before they meet 2^24.
  const uint16_t a[] = {0x4b80, 0x3f80, 0xcb80, 0x3f80};
  uint16_t b[12];
  std::fill(std::begin(b), std::end(b), 0x3f80);
  float c[10] = {};
  cpu_shim::LoadTileConfig(SmallTiles().data());
  cpu_shim::ZeroTile(0);
  cpu_shim::LoadTile(1, a, 0);
  cpu_shim::LoadTile(2, b, 12);
  cpu_shim::DotBf16({0, 1, 2});
  cpu_shim::StoreTile(0, c, 20);
  cpu_shim::ReleaseTiles();
  for (int i = 0; i < 3; ++i) {
    CHECK(c[i] == 2.f);
    CHECK(c[5 + i] == 2.f);
  }
}

}  // namespace turbomind
