#include <doctest/doctest.h>

#include <array>

#include "engine/ops_refusing_device.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/checkpoints.h"

namespace turbomind {
namespace {

// Counts copies of whole slots, and conversions.
class CountingDevice : public testing::OpsRefusingDevice {
 public:
  std::string name() const override { return "counting"; }
  void* Reserve(size_t) override { return nullptr; }
  void Release(void*, size_t) override {}
  void Copy(void*, const void*, size_t) override { ++copies; }
  void SaveCheckpoints(const StateCopyParams&) override { ++conversions; }
  void RestoreCheckpoints(const StateCopyParams&) override { ++conversions; }

  int copies = 0;
  int conversions = 0;
};

struct Arguments {
  explicit Arguments(StateFormat format, int64_t rows = 32) {
    params.shape = {.num_layers = 2, .exact_bytes = 64, .rows = rows, .cols = rows > 0 ? 16 : 0};
    params.format = format;
    params.states = {bytes.data(), params.shape.Bytes(StateFormat::kF32)};
    params.checkpoints = {bytes.data(), params.shape.Bytes(format)};
    params.copies = copies.data();
    params.num_copies = 2;
  }

  alignas(64) std::array<std::byte, 64> bytes = {};
  std::array<StateCopy, 2> copies = {{{0, 1}, {1, 0}}};
  StateCopyParams params;
};

TEST_CASE("FP32 checkpoints are copied as they are, and others converted") {
  const auto check = [](const Arguments& arguments, int copies, int conversions) {
    CountingDevice device;
    invokeSaveCheckpoints(device, arguments.params);
    invokeRestoreCheckpoints(device, arguments.params);
    CHECK(device.copies == copies);
    CHECK(device.conversions == conversions);
  };
  check(Arguments(StateFormat::kF32), 4, 0);
  check(Arguments(StateFormat::kBf16), 0, 2);
  check(Arguments(StateFormat::kInt8), 0, 2);
  check(Arguments(StateFormat::kInt8, 0), 4, 0);  // only the inputs of convolutions
}

TEST_CASE("copies that cannot be are refused") {
  const auto refused = [](auto change) {
    CountingDevice device;
    Arguments arguments(StateFormat::kInt8);
    change(arguments);
    CHECK_THROWS_AS(invokeSaveCheckpoints(device, arguments.params), InternalError);
    CHECK_THROWS_AS(invokeRestoreCheckpoints(device, arguments.params), InternalError);
  };
  refused([](Arguments& a) { a.params.copies = nullptr; });
  refused([](Arguments& a) { a.params.num_copies = 0; });
  refused([](Arguments& a) { a.params.states.data = nullptr; });
  refused([](Arguments& a) { a.params.checkpoints.data = nullptr; });
  refused([](Arguments& a) { a.params.checkpoints.slot_bytes += 64; });
  refused([](Arguments& a) { a.params.states.slot_bytes -= 64; });
  refused([](Arguments& a) { a.copies[1].slot = -1; });
  refused([](Arguments& a) { a.copies[0].checkpoint = -1; });
  refused([](Arguments& a) { a.params.shape.exact_bytes = 32; });
}

}  // namespace
}  // namespace turbomind
