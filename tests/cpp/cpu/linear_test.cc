// The arithmetics of the CPU's linear layers, which have the properties of linear_suite.h. The
// tests of single formats and arithmetics have what is special about them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/linear_fixture.h"
#include "cpu/linear_suite.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/check.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

using enum MatrixFormat;

// Adding a bias and the former output rounds twice.
double AddsTo(double want) { return std::abs(want) * 0x1p-22 + 1e-6; }

// FP32 sums in a fixed order: n roundings of at most 2^-24 of the sum of magnitudes. The scaled
// code and the minimum are added separately, so both magnitudes count.
double SumBound(const ExactOutput& out) {
  const double magnitude = out.magnitude + (HasMinimum(out.format) ? out.sum_of_x : 0);
  return magnitude * static_cast<double>(out.cols + 8) * 0x1p-24 + AddsTo(out.want);
}

// A 16-bit activation is off by at most one and a half steps of amax / 32512, plus the FP32
// rounding of the scale. Half a step comes from rounding; one step comes from changing a low half
// of -128 to -127. BF16 weights round activations to 8 significant bits.
double Int16Bound(const ExactOutput& out) {
  const double rounding = out.format == kF32    ? 0
                          : out.format == kBF16 ? out.magnitude * 0x1p-8
                                                : out.largest * 1.5 / 32512 * (1 + 1e-5);
  return rounding + SumBound(out);
}

// Sums of a product: 16 additions for the even and 16 for the odd columns of each 32, both sums
// together, and one addition for each 32 columns. The products are exact.
double Bf16TileBound(const ExactOutput& out) {
  const auto additions = static_cast<double>(out.cols / 32 + 1 + 18);
  return out.magnitude * additions * 0x1p-24 + 2 * std::abs(out.want) * 0x1p-24 +
         (out.bias ? std::abs(out.product) * 0x1p-23 : 0) + 1e-37;
}

void RoundToInt8(std::vector<float>& x) {
  for (auto block = x.begin(); block != x.end(); block += 32) {
    float amax = 0;
    std::for_each(block, block + 32, [&](float v) { amax = std::max(amax, std::abs(v)); });
    std::for_each(block, block + 32, [&](float& v) {
      v = amax == 0 ? 0.f : std::nearbyint(v * (127.f / amax)) * (amax / 127.f);
    });
  }
}

void RoundToInt12(std::vector<float>& x) {
  for (size_t at = 0; at < x.size(); at += 32) {
    const Int12Codes codes = RoundToInt12Codes(x.data() + at);
    for (size_t i = 0; i < 32; ++i) {
      x[at + i] = static_cast<float>(codes.of[i]) * codes.scale;
    }
  }
}

void RoundToBf16(std::vector<float>& x) {
  std::ranges::transform(x, x.begin(), [](float v) { return testing::RoundToBf16(v); });
}

// Returns the devices of these instruction sets that this machine can run.
std::vector<TestDevice> DevicesOf(const std::vector<std::string>& isas, CpuOptions options) {
  const std::vector<std::string> available = AvailableCpuIsas();
  std::vector<TestDevice> devices;
  for (const std::string& isa : isas) {
    if (std::find(available.begin(), available.end(), isa) == available.end()) {
      MESSAGE("skipped: this machine has no ", isa);
      continue;
    }
    devices.push_back(
        {isa, [=](int threads) { return MakeCpuDevice(threads, isa, options); }, isa == "scalar"});
  }
  return devices;
}

std::vector<Arithmetic> ListArithmetics() {
  const std::vector<MatrixFormat> all(std::begin(kAllFormats), std::end(kAllFormats));
  const std::vector<std::string> isas = AvailableCpuIsas();
  Arithmetic int16 = {.name = "16 bits",
                      .formats = all,
                      .neighbors = all,
                      .devices = DevicesOf(isas, {}),
                      .bound = Int16Bound,
                      .largest_codes = {32512.f, 32383.f},  // halves (127, 0), then (126, 127)
                      .threads = {1, 2, 5},
                      .group_threads = {1, 2},
                      .block_rows = 300};
  Arithmetic int8 = {.name = "8 bits",
                     .formats = {kQ4_0, kQ4_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K},
                     .neighbors = all,
                     .devices = DevicesOf(isas, {.int8_activations = true}),
                     .bound = SumBound,
                     .round = RoundToInt8,
                     .largest_codes = {127.f, 127.f}};
  Arithmetic int12 = {.name = "12 bits",
                      .formats = {kQ4_0, kQ4_1, kQ4_K},
                      .neighbors = all,
                      .devices = DevicesOf({"avx512"}, {.deterministic = false}),
                      .bound = SumBound,
                      .round = RoundToInt12,
                      .largest_codes = {119.f * 256, 119.f * 256}};
  int12.calls = {};
  for (int n = 1; n <= 25; ++n) {
    int12.calls.push_back({n, n % 2 == 0, n % 3 == 0});
  }
  Arithmetic bf16 = {
      .name = "BF16 tiles",
      .formats = {all.begin() + 1, all.end()},
      .neighbors = all,
      .devices = DevicesOf({"amx"}, {.deterministic = false}),
      .bound = Bf16TileBound,
      .random = RandomBf16Weights,
      .round = RoundToBf16,
      .overflows = true,
      .min_rows = 32,
      .calls =
          {{32}, {33, true}, {48, false, true}, {49, true, true}, {64, true}, {95, false, true}},
      .outputs = {1, 32, 37},
      .odd_cols = {1, 31, 66, 1055},
      .long_cols = {1056},
      .batches = {32, 49, 95},
      .panel_cols = 768,
      .block_outputs = 400,
      .block_cols = 1024,
      .block_rows = 800,
      .block_threads = 1};
  std::vector<Arithmetic> arithmetics;
  for (const Arithmetic& arithmetic : {int16, int8, int12, bf16}) {
    if (!arithmetic.devices.empty()) {
      arithmetics.push_back(arithmetic);
    }
  }
  return arithmetics;
}

const std::vector<Arithmetic>& Arithmetics() {
  static const std::vector<Arithmetic> arithmetics = ListArithmetics();
  return arithmetics;
}

MatrixSource PackedSource(const PackedMatrix& matrix, std::shared_ptr<const void> owner) {
  MatrixSource source{matrix.format, matrix.packed_data(), matrix.rows, matrix.cols};
  source.owner = std::move(owner);
  source.packed = true;
  return source;
}

// A matrix can be loaded from its packed bytes, in place or copied. They have the size of the file,
// beside NVFP4's factors.
void LoadsFromPackedBytes(const Subject& s) {
  const Matrix m = s.Random(48, 512, 47);
  ForDevices(s, 2, [&](Device& device, bool) {
    const std::shared_ptr<const PackedMatrix> first = device.PackMatrix(m.source(), false);
    if (IsMxfp4(s.format)) {
      CHECK(first->packed_data() == nullptr);
      MatrixSource packed = m.source();
      packed.packed = true;
      CHECK_THROWS_AS(device.PackMatrix(packed, false), InvalidArgument);
      return;
    }
    REQUIRE(first->packed_data() != nullptr);
    REQUIRE(first->num_bytes() == PackedBytes(s.format, m.rows, m.cols));
    REQUIRE(first->num_bytes() ==
            static_cast<int64_t>(m.bytes.size()) + m.rows / kTileRows * TileHeaderBytes(s.format));
    const auto in_place = device.PackMatrix(PackedSource(*first, first), false);
    const auto copied = device.PackMatrix(PackedSource(*first, nullptr), false);
    CHECK(first.use_count() == 2);  // in_place holds it, copied does not
    CHECK(in_place->packed_data() == first->packed_data());
    CHECK(copied->packed_data() != first->packed_data());
    CHECK(std::equal(first->packed_data(), first->packed_data() + first->num_bytes(),
                     copied->packed_data()));
    if (s.format == MatrixFormat::kF32) {
      device.PackMatrix(PackedSource(*first, first), true);
    } else {
      CHECK_THROWS_AS(device.PackMatrix(PackedSource(*first, first), true), InvalidArgument);
    }
    MatrixSource misaligned = PackedSource(*first, first);
    misaligned.data = first->packed_data() + 4;
    CHECK_THROWS_AS(device.PackMatrix(misaligned, false), InvalidArgument);
  });
}

}  // namespace

TEST_CASE("products agree with a double reference for every shape") {
  ForSubjects(Arithmetics(), AgreesWithDouble);
}
TEST_CASE("a row has the same bits in every batch, thread and instruction set") {
  ForSubjects(Arithmetics(), SameBitsInEveryBatch);
}
TEST_CASE("a row has the same bits in several row blocks") {
  ForSubjects(Arithmetics(), SameBitsInSeveralRowBlocks);
}
TEST_CASE("rows grouped by weight have the same bits as alone") {
  ForSubjects(Arithmetics(), GroupedRowsEqualOneRow);
}
TEST_CASE("matrices of several formats share a layer") {
  ForSubjects(Arithmetics(), PartsShareALayer);
}
TEST_CASE("NaN and infinite activations affect only the outputs of their row") {
  ForSubjects(Arithmetics(), PoisonStaysInItsRow);
}
TEST_CASE("a scale that is NaN or infinite affects only its output") {
  ForSubjects(Arithmetics(), BadScaleStaysInItsOutput);
}
TEST_CASE("zero, tiny and huge activations do not overflow their scale") {
  ForSubjects(Arithmetics(), ScalesOfActivationsDoNotOverflow);
}
TEST_CASE("the largest codes times the largest activations are summed exactly") {
  ForSubjects(Arithmetics(), ExtremesAreExact);
}
TEST_CASE("a packed matrix returns exact embedding rows") {
  ForSubjects(Arithmetics(), EmbedsExactly);
}
TEST_CASE("a matrix can be loaded from its packed bytes") {
  ForSubjects(Arithmetics(), LoadsFromPackedBytes);
}
TEST_CASE("matrices that cannot be packed are rejected") {
  ForSubjects(Arithmetics(), RejectsBadSources);
}

TEST_CASE("embedding rejects tokens past the end of the table") {
  const auto device = MakeCpuDevice(2);
  const auto table = device->PackMatrix(RandomMatrix(kQ4_0, 50, 96, 41).source(), false);
  const std::vector<int32_t> ids = {49, 0, 50};
  std::vector<float> out(ids.size() * 96);
  CHECK_THROWS_AS(device->Embed({table.get(), ids.data(), out.data(), 3}), InvalidArgument);
}

// Files of packed weights outlive a build. A change of the tiles needs a new kPackedLayoutId and
// then new values here.
TEST_CASE("the tiles match the layout id") {
  REQUIRE(kPackedLayoutId == 1);
  struct Tiles {
    MatrixFormat format;
    int64_t cols;
    uint64_t hash;
  };
  const auto device = MakeCpuDevice(1);
  for (const Tiles& tiles : {Tiles{kF32, 64, 7030175867461189190u},
                             {kBF16, 64, 9555641935666747825u},
                             {kQ4_0, 64, 12850000725789936096u},
                             {kQ4_1, 64, 13224752672577948833u},
                             {kQ8_0, 64, 4943437910362433791u},
                             {kQ4_K, 512, 105624635994506871u},
                             {kQ5_K, 512, 8181497459346064651u},
                             {kQ6_K, 512, 12674340872646967210u},
                             {kNvfp4, 512, 14414699395029792454u}}) {
    CAPTURE(static_cast<int>(tiles.format));
    const Matrix m = RandomMatrix(tiles.format, 20, tiles.cols, 53);
    const auto packed = device->PackMatrix(m.source(), false);
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (int64_t i = 0; i < packed->num_bytes(); ++i) {
      hash = (hash ^ packed->packed_data()[i]) * 0x100000001b3;
    }
    CHECK(hash == tiles.hash);
  }
}
